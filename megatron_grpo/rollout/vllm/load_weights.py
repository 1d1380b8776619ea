"""Loading of new weights into a running vLLM."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_grpo.rollout.vllm.adapter import base_model
from megatron_grpo.rollout.vllm.loading_shapes import IN_PLACE_EXPERTS, loading_shapes, mixer_convolutions
from megatron_grpo.utils.errors import GrpoError

Weights = Iterator[tuple[str, torch.Tensor]]
# Methods of vLLM's layers that use weights as they are loaded; the last one is ours (vllm/exact.py).
PLAIN = {
    "NoneType",
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "UnquantizedFusedMoEMethod",
    "ExactLinearMethod",
}


def load_weights(worker, weights: Weights) -> None:
    """Load all ``weights`` (Hugging Face names) into a worker's model, with the same result as loading from files.

    Iterating can put weights straight into parameters: if none is left, the loaders do not run. Adapters of the model
    are lost. GrpoError if vLLM has rearranged gpt-oss's experts in a way that cannot be repeated.
    """
    first = next(weights, None)
    if first is None:
        return
    weights, runner = itertools.chain([first], weights), worker.model_runner
    with base_model(worker) as model:
        load_model(model, lambda weights: runner.reload_weights(weights_iterator=weights), weights)


def load_model(model: Any, reload: Callable[[Weights], None], weights: Weights) -> None:
    """Load ``weights`` into a model of vLLM; ``reload`` does it by vLLM's reload, which repeats all processing."""
    is_gpt_oss = _is_gpt_oss(model)
    name_loaders(model)
    if torch.cuda.is_available():
        if is_gpt_oss:
            _check_plain_experts(model)
            model.load_weights(weights)  # in place: a reload would lose the sinks (`_without_sinks`)
        elif can_load_in_place(model):
            with loading_shapes(model):  # kernels have replaced parameters that have loaders
                model.load_weights(weights)  # a reload would hold each layer twice
        else:
            reload(weights)
        return
    # The CPU build (0.32) packs experts when it creates their kernel, so only once: after a reload the kernel would
    # read plain weights as packed ones. Without a kernel, a reload packs again and creates the kernel again. The
    # kernels of GPU builds (0.26) keep no state, and these builds rearrange the weights at every load.
    for method in _expert_methods(model):
        method.moe_kernel = None
    sinks: list[tuple[str, torch.Tensor]] = []
    # Unlike model.load_weights, a reload repeats vLLM's processing after loading (packing on a CPU).
    weights = by_expert(model, weights)
    reload(_without_sinks(weights, sinks) if is_gpt_oss else weights)
    if sinks:
        model.load_weights(sinks)
    _pack_tied_heads(model)
    _copy_plain_convolutions(model)


def name_loaders(model: torch.nn.Module) -> None:
    """Give every loader of a parameter a name, which vLLM's reload reads: MiniMax-M2's norms have partial functions."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def _pack_tied_heads(model: torch.nn.Module) -> None:
    """Repack the weights of every head that shares them with an embedding.

    A reload on a CPU repacks only layers that received a tensor, so the head would keep its old packed weights. The
    head of a vision-language model is in its language model.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    shared = {id(layer.weight) for layer in layers if layer not in heads}
    for head in heads:
        if id(head.weight) in shared:
            head.quant_method.process_weights_after_loading(head)


def _copy_plain_convolutions(model: torch.nn.Module) -> None:
    """Copy the convolutions of Mamba-2 to where its kernels read them.

    In vLLM (0.32) on a CPU, packing moves the weight in bf16, and a reload leaves the buffer that was a view of it.
    """
    for _, read, weight in mixer_convolutions(model):
        read.copy_(weight)


def by_expert(model: torch.nn.Module, weights: Weights) -> Weights:
    """Yield ``weights``, with the stacked experts of gpt-oss on a CPU split into single experts.

    Single experts are loaded like all other weights. vLLM's gpt-oss loader instead copies stacks of experts directly
    into the parameters, which a reload has replaced and a kernel may have padded.
    """
    stacked = _is_gpt_oss(model) and not torch.cuda.is_available()
    for name, tensor in weights:
        if stacked and ".mlp.experts." in name:
            layer, _, part = name.rpartition(".")
            yield from ((f"{layer}.{expert}.{part}", one) for expert, one in enumerate(tensor))
        else:
            yield name, tensor


def _without_sinks(weights: Weights, sinks: list[tuple[str, torch.Tensor]]) -> Weights:
    """Yield gpt-oss's weights without the sinks, and append these to ``sinks``.

    vLLM's gpt-oss loader copies the sinks into parameters that a reload has replaced, so they would be lost.
    """
    for name, tensor in weights:
        if name.endswith(".sinks"):
            sinks.append((name, tensor.clone()))
        else:
            yield name, tensor


def _is_gpt_oss(model: torch.nn.Module) -> bool:
    return type(model).__name__ == "GptOssForCausalLM"


def can_load_in_place(model: torch.nn.Module) -> bool:
    """Return whether a model on a GPU uses its weights as loaded, without quantization.

    Experts: with kernels of `IN_PLACE_EXPERTS`, except for gpt-oss, whose loaders compute. Latent attention: if its
    copies of kv_b_proj are views of it.
    """
    if not torch.cuda.is_available() or _is_gpt_oss(model):
        return False
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
    return (
        methods <= PLAIN
        and all(method.unquantized_backend.name in IN_PLACE_EXPERTS for method in _expert_methods(model))
        and all(_copies_are_views(m) for m in model.modules() if type(m).__name__ == "MLAAttention")
    )


def _copies_are_views(attention: Any) -> bool:
    """Return whether latent attention's copies of the weight of kv_b_proj share its memory."""
    storage = attention.kv_b_proj.weight.untyped_storage().data_ptr()
    copies = [getattr(attention, name, None) for name in ("W_UV", "W_UK_T")]
    others = [getattr(attention, name, None) for name in ("W_K", "W_V", "W_UK_T_dcp_qrep")]
    return all(copy is not None and copy.untyped_storage().data_ptr() == storage for copy in copies) and not any(
        isinstance(copy, torch.Tensor) for copy in others
    )


def _check_plain_experts(model: torch.nn.Module) -> None:
    for method in _expert_methods(model):
        if method.unquantized_backend.name != "TRITON":
            raise GrpoError(
                f"vLLM runs gpt-oss's experts with {method.unquantized_backend.name}, whose rearranged weights cannot "
                "be loaded again: this program supports only vLLM's Triton kernels for gpt-oss"
            )


def _expert_methods(model: torch.nn.Module) -> Iterator:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return (method for method in methods if isinstance(method, UnquantizedFusedMoEMethod))
