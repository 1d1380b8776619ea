"""What a running vLLM holds, compared with a stream of weights; what differs is named.

The stream goes through the model's own ``load_weights`` once more, and every copy into a parameter compares instead:
so vLLM itself says which part of which fused parameter a tensor belongs to. Nothing is written.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.rollout.vllm.load_weights import Weights, by_expert

# Kernels that take experts as they are loaded, or (the last) whose arrangement is undone here.
READABLE_EXPERTS = ("TRITON", "BATCHED_TRITON", "CPU")


def can_compare(worker) -> bool:
    """Whether the weights are there in a form that compares with those of the trainer: not when quantized."""
    return worker.model_runner.model_config.quantization is None


def compare_weights(worker, weights: Weights) -> list[str]:
    """What a worker's model holds other than ``weights`` (Hugging Face names), a line for each tensor."""
    model = worker.model_runner.get_model()
    lines = _stale_copies(model)
    with torch.no_grad(), _as_loaded(model) as names, _Compare(names) as compare:
        model.load_weights(by_expert(model, compare.naming(weights)))
    counts = {name: int(torch.stack(parts).sum()) for name, parts in compare.differing.items()}
    lines += [f"{name}: {count:,} of its elements differ" for name, count in counts.items() if count]
    # Neither is the stream complete by itself: a parameter that no tensor reaches has whatever it had before.
    lines += [f"{name} (vLLM's name): no tensor reaches it" for name in names.values() if name not in compare.reached]
    return lines


class _Compare(TorchDispatchMode):
    """Within, a copy into one of the parameters, given as ``{storage: name}``, counts the elements that differ."""

    def __init__(self, parameters: dict[int, str]):
        super().__init__()
        self.parameters = parameters
        self.reached: set[str] = set()
        self.differing: dict[str, list[torch.Tensor]] = {}
        self.current = ""

    def naming(self, weights: Weights) -> Weights:
        """The stream itself; what is copied behind a tensor is counted under its name."""
        for name, tensor in weights:
            self.current = name
            yield name, tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Let everything but such copies pass."""
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        if target.is_meta:  # in an arrangement that is not known here
            return target
        name = self.parameters.get(_storage(target))
        if name is None:
            return func(*args, **(kwargs or {}))
        self.reached.add(name)
        self.differing.setdefault(self.current, []).append((target != source.to(target)).sum())
        return target


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def _as_loaded(model: torch.nn.Module) -> Iterator[dict[int, str]]:
    """Within, parameters are as ``load_weights`` wants them, with what the kernels have; yields ``{storage: name}``.

    vLLM keeps the shapes and loaders that parameters had before the kernels' arrangement, for its own reloads.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    kept: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    views: dict[int, torch.Tensor] = {}  # tied parameters stay one
    names: dict[int, str] = {}
    try:
        for prefix, layer in model.named_modules():
            recorded = get_layerwise_info(layer).restore_metadata[0]
            for name, parameter in list(layer._parameters.items()):
                if parameter is None or name not in recorded:
                    if parameter is not None:  # a bias: it has its loader still
                        names[_storage(parameter)] = f"{prefix}.{name}"
                    continue
                kept.append((layer, name, parameter))
                if id(parameter) not in views:
                    like = restore_layer_refs(recorded[name], layer)
                    view = _held(layer, name, parameter, like).detach()
                    view.__class__, view.__dict__ = like.__class__, dict(like.__dict__)
                    view.weight_loader = _get_original_loader(like)  # a reload has put its own around it
                    views[id(parameter)] = view
                    if not view.is_meta:
                        names[_storage(view)] = f"{prefix}.{name}"
                layer._parameters[name] = views[id(parameter)]
        yield names
    finally:
        for layer, name, parameter in kept:
            layer._parameters[name] = parameter


def _held(layer, name: str, parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A parameter in the arrangement in which it is loaded; on the meta device where that cannot be told."""
    experts = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
    if experts is not None and experts.name not in READABLE_EXPERTS:
        return torch.empty_like(like)
    if experts is not None and experts.name == "CPU" and parameter.ndim == 3:
        parameter = _unpacked_experts(layer, parameter, like)
    elif name == "weight" and parameter.shape != like.shape and hasattr(layer, "cpu_linear"):
        parameter = _by_the_kernel(layer, like)
    return parameter if parameter.shape == like.shape else torch.empty_like(like)


def _by_the_kernel(layer, like: torch.Tensor) -> torch.Tensor:
    """The weight that a linear layer's kernel on a CPU has packed away: what it makes of the identity, exactly."""
    return layer.cpu_linear(torch.eye(like.shape[1], dtype=like.dtype), layer.weight, None).t()


def _stale_copies(model: torch.nn.Module) -> list[str]:
    """Of layers on a CPU that have their weight twice, plain for lookup and packed: a line where these differ."""
    lines = []
    for prefix, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
            count = int((_by_the_kernel(layer, weight) != weight).sum())
            lines += [f"{prefix}.weight (vLLM's name): {count:,} elements differ in its kernel"] * (count > 0)
    return lines


def _unpacked_experts(layer, packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Experts ``[experts, rows, columns]`` as they were before the kernel on a CPU padded and packed them.

    Packing moves elements. Where to is seen by packing their numbers, byte by byte since bfloat16 counts to 256 only.
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
    if like.shape[1] != plain.shape[1]:  # gate and up, each padded at its end
        gate, up = plain.chunk(2, dim=1)
        plain = torch.cat([gate[:, : like.shape[1] // 2], up[:, : like.shape[1] // 2]], dim=1)
    return plain[:, :, : like.shape[2]].contiguous()
