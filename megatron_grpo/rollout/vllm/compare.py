"""Comparison of a running vLLM's weights with a stream of weights, tensor by tensor.

The stream goes through the model's own ``load_weights`` again, with every copy into a parameter replaced by a
comparison: vLLM's loaders thus map each tensor to its part of a fused parameter. No parameter is written.
"""

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.rollout.vllm.adapter import base_model
from megatron_grpo.rollout.vllm.load_weights import Weights, by_expert, name_loaders
from megatron_grpo.rollout.vllm.loading_shapes import (
    loading_shapes,
    mixer_convolutions,
    plain_convolution,
    storage_of,
    unpacked_weight,
)


def can_compare(worker) -> bool:
    """Return whether the worker's weights are comparable with the trainer's; quantized weights are not."""
    return worker.model_runner.model_config.quantization is None


def compare_weights(worker, weights: Weights) -> list[str]:
    """Return one line for each tensor of a worker's model that differs from ``weights`` (Hugging Face names).

    Adapters are not compared.
    """
    with base_model(worker) as model:
        return compare_model(model, weights)


def compare_model(model: Any, weights: Weights, without: Container[int] = ()) -> list[str]:
    """Return the lines of `compare_weights` for a model of vLLM, except for parameters ``without`` (storages)."""
    name_loaders(model)
    lines = _stale_copies(model)
    with torch.no_grad(), loading_shapes(model) as names, _Compare(names) as compare:
        model.load_weights(by_expert(model, compare.naming(weights)))
    counts = {name: int(torch.stack(parts).sum()) for name, parts in compare.differing.items()}
    lines += [f"{name}: {count:,} of its elements differ" for name, count in counts.items() if count]
    # The stream may be incomplete: a parameter that no tensor reaches keeps its old content.
    needed = [name for storage, name in names.items() if storage not in without and name not in compare.reached]
    lines += [f"{name} (vLLM's name): no tensor reaches it" for name in needed]
    return lines


class _Compare(TorchDispatchMode):
    """Context in which a copy into a parameter (of ``{storage: name}``) counts the differing elements instead."""

    def __init__(self, parameters: dict[int, str]):
        super().__init__()
        self.parameters = parameters
        self.reached: set[str] = set()
        self.differing: dict[str, list[torch.Tensor]] = {}
        self.current = ""

    def naming(self, weights: Weights) -> Weights:
        """Yield the stream; copies made after a tensor is yielded are counted under its name."""
        for name, tensor in weights:
            self.current = name
            yield name, tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Compare for copies into the parameters; run every other operation."""
        if func is torch.ops.aten.fill_.Scalar and storage_of(args[0]) in self.parameters:
            if args[0].numel() > 1:
                return args[0]  # rows that pad the vocabulary
            target, source = args[0], args[0].new_full(args[0].shape, args[1])  # vLLM's copy of a single element
        elif func is torch.ops.aten.copy_.default:
            target, source = args[:2]
        else:
            return func(*args, **(kwargs or {}))
        if target.is_meta:  # an unknown arrangement, see `_loadable_parameter`
            return target
        name = self.parameters.get(storage_of(target))
        if name is None:
            return func(*args, **(kwargs or {}))
        self.reached.add(name)
        self.differing.setdefault(self.current, []).append((target != source.to(target)).sum())
        return target


def _stale_copies(model: torch.nn.Module) -> list[str]:
    """Compare what kernels read with the weights; return a line for each layer in which they differ."""
    lines = []
    for name, read, expected in _copies(model):
        count = int((read != expected).sum())
        lines += [f"{name}.weight (vLLM's name): {count:,} elements differ in its kernel"] * (count > 0)
    return lines


def _copies(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield a layer's name, the copy of its weight that its kernel reads, and the numbers that the copy must have."""
    from vllm import _custom_ops

    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
            yield name, unpacked_weight(layer, weight), weight
        elif (plain := plain_convolution(layer)) is not None:
            yield name, weight, _custom_ops.causal_conv1d_weight_pack(plain)
    yield from mixer_convolutions(model)
