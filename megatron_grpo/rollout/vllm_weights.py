"""How a running vLLM takes new weights."""

from collections.abc import Iterator

import torch

from megatron_grpo.errors import GrpoError

Weights = Iterator[tuple[str, torch.Tensor]]


def load_weights(worker, weights: Weights) -> None:
    """Give a worker's model all ``weights``, under their Hugging Face names, as it would have loaded them from files.

    GrpoError when vLLM has arranged gpt-oss's experts in a way that cannot be repeated.
    """
    runner = worker.model_runner
    is_gpt_oss = type(runner.get_model()).__name__ == "GptOssForCausalLM"
    if torch.cuda.is_available():
        if is_gpt_oss:
            _check_plain_experts(runner.get_model())
            runner.get_model().load_weights(weights)  # see _for_a_reload: where nothing is rearranged, in place
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
    runner.reload_weights(weights_iterator=_for_a_reload(weights, sinks) if is_gpt_oss else weights)
    if sinks:
        runner.get_model().load_weights(sinks)


def _for_a_reload(weights: Weights, sinks: list[tuple[str, torch.Tensor]]) -> Weights:
    """gpt-oss's weights without the sinks, which are put into ``sinks``, and with experts one by one.

    Its loader in vLLM copies sinks and stacks of experts straight into parameters that a reload has put aside, where
    they would be lost; experts of their own go the same way as all other weights.
    """
    for name, tensor in weights:
        if name.endswith(".sinks"):
            sinks.append((name, tensor.clone()))
        elif ".mlp.experts." in name:
            layer, _, part = name.rpartition(".")
            yield from ((f"{layer}.{expert}.{part}", one) for expert, one in enumerate(tensor))
        else:
            yield name, tensor


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
