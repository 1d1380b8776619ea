"""The parameters of a running vLLM in the shapes that its loaders expect."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

IN_PLACE_EXPERTS = ("TRITON", "BATCHED_TRITON")  # kernels that use experts as loaded
# Kernels that use experts as loaded, or with an arrangement that this module can undo (the last).
READABLE_EXPERTS = (*IN_PLACE_EXPERTS, "CPU")
_SCALAR = "layer_scalar"  # a buffer that is loaded (Gemma 4)


@contextlib.contextmanager
def loading_shapes(model: torch.nn.Module, contents: bool = True) -> Iterator[dict[int, str]]:
    """Context in which parameters have the shapes that ``load_weights`` expects; yields ``{storage: name}``.

    Their ``contents`` are the kernels'; without, they are meta tensors. For its own reloads, vLLM keeps the shapes and
    loaders that the parameters had before the kernels rearranged them.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    kept: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    loaders: list[tuple[Any, Callable]] = []  # parameters, to which vLLM adds weight_loader
    views: dict[int, torch.Tensor] = {}  # tied parameters share one view
    names: dict[int, str] = {}
    try:
        for prefix, layer in model.named_modules():
            recorded = get_layerwise_info(layer).restore_metadata[0]
            if layer._buffers.get(_SCALAR) is not None:
                names[storage_of(layer._buffers[_SCALAR])] = f"{prefix}.{_SCALAR}"
            for name, parameter in list(layer._parameters.items()):
                if parameter is None or name not in recorded:
                    if parameter is not None:  # a bias, which still has its loader
                        names[storage_of(parameter)] = f"{prefix}.{name}"
                        if hasattr(parameter, "weight_loader"):  # that of a reload which left its layer out
                            loaders.append((parameter, parameter.weight_loader))
                            parameter.weight_loader = _of_results(_get_original_loader(parameter))
                    continue
                kept.append((layer, name, parameter))
                if id(parameter) not in views:
                    like = restore_layer_refs(recorded[name], layer)
                    view: Any = (_loadable_parameter(layer, name, parameter, like) if contents else like).detach()
                    view.__class__, view.__dict__ = like.__class__, dict(like.__dict__)
                    view.weight_loader = _of_results(_get_original_loader(like))  # a reload has wrapped it
                    views[id(parameter)] = view
                    if not view.is_meta:
                        names[storage_of(view)] = f"{prefix}.{name}"
                layer._parameters[name] = views[id(parameter)]
        yield names
    finally:
        for layer, name, parameter in kept:
            layer._parameters[name] = parameter
        for parameter, loader in loaders:
            parameter.weight_loader = loader


def _of_results(loader: Callable) -> Callable:
    """Return a loader that copies once what vLLM's composed loader computes from a copy in place (A of Mamba: -exp).

    The second copy would compare the function of the parameter with the parameter.
    """
    if getattr(loader, "__qualname__", "") != "composed_weight_loader.<locals>.composed_loader":
        return loader
    parts = inspect.getclosurevars(loader).nonlocals
    return lambda parameter, tensor: parts["loader"](parameter, parts["fn"](tensor))


def _loadable_parameter(layer, name: str, parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a parameter in the arrangement in which it is loaded; a meta tensor if this cannot be restored."""
    experts = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
    if experts is not None and experts.name not in READABLE_EXPERTS:
        return torch.empty_like(like)
    if experts is not None and experts.name == "CPU" and parameter.ndim == 3:
        parameter = _unpacked_experts(layer, parameter, like)
    elif name == "weight" and (plain := plain_convolution(layer)) is not None:
        parameter = plain.view(like.shape)
    elif name == "weight" and parameter.shape != like.shape and hasattr(layer, "cpu_linear"):
        parameter = unpacked_weight(layer, like)
    return parameter if parameter.shape == like.shape else torch.empty_like(like)


def unpacked_weight(layer, like: torch.Tensor) -> torch.Tensor:
    """Return the weight that a linear layer's CPU kernel has packed: its output for the identity, which is exact."""
    return layer.cpu_linear(torch.eye(like.shape[1], dtype=like.dtype), layer.weight, None).t()


def plain_convolution(layer) -> torch.Tensor | None:
    """Return the weight of a convolution as it was before the CPU kernel packed it, which vLLM keeps; else None."""
    return getattr(layer, "_cpu_unpacked_conv_weight", None)


def mixer_convolutions(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name of each convolution of Mamba-2, the buffer that its kernels read, and the weight.

    The buffer is a view of the weight, until vLLM's CPU build packs the weight and so moves it.
    """
    for name, mixer in model.named_modules():
        if (read := mixer._buffers.get("conv_weights")) is not None:
            plain = plain_convolution(mixer.conv1d)
            yield f"{name}.conv1d", read, (mixer.conv1d.weight if plain is None else plain).detach().view_as(read)


def _unpacked_experts(layer, packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return experts ``[experts, rows, columns]`` as they were before the CPU kernel padded and packed them.

    Packing permutes the elements. Packing the elements' indices gives the permutation; this is done byte by byte,
    because bfloat16 represents integers exactly only up to 256.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    isa = layer.quant_method.moe_kernel.fused_experts.isa
    number = torch.arange(packed[0].numel()).view_as(packed[:1])
    origin = torch.zeros_like(number)
    for byte in range(4):
        digits = (number >> 8 * byte & 255).to(packed.dtype)
        origin += cpu_prepack_moe_weight(digits, isa).long() << 8 * byte
    plain = torch.empty_like(packed)
    plain.view(len(packed), -1)[:, origin.flatten()] = packed.view(len(packed), -1)
    if like.shape[1] != plain.shape[1]:  # gate and up, each with padding at its end
        gate, up = plain.chunk(2, dim=1)
        plain = torch.cat([gate[:, : like.shape[1] // 2], up[:, : like.shape[1] // 2]], dim=1)
    return plain[:, :, : like.shape[2]].contiguous()


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells the memory of a tensor from that of others."""
    return tensor.untyped_storage().data_ptr()
