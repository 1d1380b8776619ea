"""How a running vLLM takes new weights."""

from collections.abc import Iterator

import torch

from megatron_grpo.utils.errors import GrpoError

Weights = Iterator[tuple[str, torch.Tensor]]


def load_weights(worker, weights: Weights) -> None:
    """Give a worker's model all ``weights``, under their Hugging Face names, as it would have loaded them from files.

    GrpoError when vLLM has arranged gpt-oss's experts in a way that cannot be repeated.
    """
    runner = worker.model_runner
    is_gpt_oss = _is_gpt_oss(runner.get_model())
    if torch.cuda.is_available():
        if is_gpt_oss:
            _check_plain_experts(runner.get_model())
            runner.get_model().load_weights(weights)  # see _without_sinks: where nothing is rearranged, in place
        elif _loads_in_place(runner.get_model()):
            runner.get_model().load_weights(weights)  # a reload would hold each layer twice
        else:
            runner.reload_weights(weights_iterator=weights)
        return
    # The CPU build (0.32) packs experts together with making their kernel, so only once: after a reload the kernel
    # would take plain weights for packed ones. Without a kernel it does both again. GPU builds (0.26) have nothing
    # in the kernel, and arrange the weights at every load.
    for method in _expert_methods(runner.get_model()):
        method.moe_kernel = None
    sinks: list[tuple[str, torch.Tensor]] = []
    # Not model.load_weights alone: this also redoes what vLLM made of the weights after loading (packing on a CPU).
    weights = by_expert(runner.get_model(), weights)
    runner.reload_weights(weights_iterator=_without_sinks(weights, sinks) if is_gpt_oss else weights)
    if sinks:
        runner.get_model().load_weights(sinks)
    _pack_tied_head(runner.get_model())


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Have a head that shares the embedding's weights pack them anew: a reload on a CPU does so for layers alone that
    tensors came for, and the head would go on with what it packed before.
    """
    head = getattr(model, "lm_head", None)
    shared = getattr(head, "weight", None)
    if shared is not None and any(parameter is shared for parameter in model.model.parameters()):
        head.quant_method.process_weights_after_loading(head)


def by_expert(model: torch.nn.Module, weights: Weights) -> Weights:
    """``weights`` with the experts of a gpt-oss on a CPU one by one: so they go the same way as all other weights.

    Its loader in vLLM copies stacks of experts straight into parameters, which a reload has put aside and whose kernel
    may have padded them.
    """
    stacked = _is_gpt_oss(model) and not torch.cuda.is_available()
    for name, tensor in weights:
        if stacked and ".mlp.experts." in name:
            layer, _, part = name.rpartition(".")
            yield from ((f"{layer}.{expert}.{part}", one) for expert, one in enumerate(tensor))
        else:
            yield name, tensor


def _without_sinks(weights: Weights, sinks: list[tuple[str, torch.Tensor]]) -> Weights:
    """gpt-oss's weights without the sinks, which are put into ``sinks``: its loader would copy them into parameters
    that a reload has put aside, where they would be lost.
    """
    for name, tensor in weights:
        if name.endswith(".sinks"):
            sinks.append((name, tensor.clone()))
        else:
            yield name, tensor


def _is_gpt_oss(model: torch.nn.Module) -> bool:
    return type(model).__name__ == "GptOssForCausalLM"


def _loads_in_place(model: torch.nn.Module) -> bool:
    """Whether a model on a GPU computes with its weights as they are loaded: linear layers that are not quantized."""
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
    plain = methods <= {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
    return plain and not any(type(module).__name__ == "MLAAttention" for module in model.modules())


def _check_plain_experts(model: torch.nn.Module) -> None:
    for method in _expert_methods(model):
        if method.unquantized_backend.name != "TRITON":
            raise GrpoError(
                f"vLLM runs gpt-oss's experts by {method.unquantized_backend.name}, for which it rearranges weights "
                "that it could not take anew: this program knows its Triton kernels only"
            )


def _expert_methods(model: torch.nn.Module) -> Iterator:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return (method for method in methods if isinstance(method, UnquantizedFusedMoEMethod))
