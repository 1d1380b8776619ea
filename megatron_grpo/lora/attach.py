"""Adapters of a built model: base weights frozen, one adapter for every Megatron layer with a target.

The adapters of a chunk are the module ``chunk.lora``. Forward hooks add their outputs to those of the layers, whose
classes, parameters and checkpoint keys stay as they are.
"""

import contextlib
import zlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_grpo.lora.fp8_base import quantize
from megatron_grpo.lora.layers import Adapter
from megatron_grpo.lora.table import Pair, pairs
from megatron_grpo.lora.targets import saved_weights
from megatron_grpo.models.router import Router
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.parameter_mapping import Weight


class Adapters(nn.Module):
    """The adapters of one chunk, by the name of the layer, with "/" for its dots."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()

    def add(self, layer: str, adapter: Adapter) -> None:
        self.layers[layer.replace(".", "/")] = adapter

    def __iter__(self) -> Iterator[Adapter]:
        yield from self.layers.values()  # type: ignore[misc]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the matrices' shards, with keys of Hugging Face's layers; those of all experts are one tensor."""
        state: ShardedStateDict = {}
        for layer, adapter in self.layers.items():
            for name, entry in adapter.sharded_parameters():  # type: ignore[operator]
                state[f"{prefix}layers.{layer}.{name}"] = entry
        return state


def attach(args: Namespace, model: Sequence[nn.Module]) -> None:
    """Freeze the model's weights, and add newly initialised adapters of --lora-target-modules. Collective.

    Call this after the weights are loaded, and before the optimizer is built. A layer's output does not change, because
    B is zero, unless --lora-base-dtype stores its weight in fewer bits.
    """
    saved = {weight.name for weight in saved_weights(args)}
    by_base: dict[str, list[Pair]] = {}
    for pair in pairs(args):
        by_base.setdefault(pair.base.name, []).append(pair)
    for chunk in map(unwrap_model, model):
        chunk.requires_grad_(False)
        # The balance of experts is part of the base.
        chunk.config.moe_router_bias_update_rate = 0.0
        for name, parameter in chunk.named_parameters():
            if any(canonical in saved for canonical, _ in model_weights.canonical(chunk, name, parameter)):
                parameter.requires_grad_(True)
        quantize(args, chunk)
        layers = dict(_layers(chunk, by_base))
        chunk.lora = Adapters()
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "expt_tp"])
        for name, experts in layers.items():
            layer = chunk.get_submodule(name)
            stacked = any(parameter.dim() == 3 for parameter in layer.parameters(recurse=False))
            adapter = Adapter(args, chunk.config, experts, groups, stacked or hasattr(layer, "weight0"), layer)
            adapter.initialize(partial(initial_value, args))
            adapter.set_norms()
            chunk.lora.add(name, adapter)
            if isinstance(layer, Router):
                layer.set_adapter(partial(_gating, adapter))
            else:
                _hook(layer, adapter)
        if hasattr(chunk, "embedding"):
            chunk.embedding.register_forward_hook(_require_gradient)


def adapters(model: Sequence[nn.Module]) -> Iterator[Adapter]:
    """Yield the adapters of all chunks."""
    for chunk in map(unwrap_model, model):
        yield from getattr(chunk, "lora", ())


@contextlib.contextmanager
def switched_off(model: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which the model computes without its adapters; weights that are trained whole stay as they are."""
    for adapter in adapters(model):
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters(model):
            adapter.enabled = True


def trained(model: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters of the adapters, and those that are trained whole."""
    for chunk in model:
        yield from (parameter for parameter in chunk.parameters() if parameter.requires_grad)


def local_adapter(model: Sequence[nn.Module]) -> list[tuple[Weight, Tensor]]:
    """Return (weight of the adapter's table, tensor) for each matrix on this rank; the tensors share its memory."""
    return [row for adapter in adapters(model) for row in adapter.weights()]


def initial_value(args: Namespace, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the initial float32 matrix of a Hugging Face name, equal in every parallel configuration.

    A is uniform in (-1 / sqrt(in), 1 / sqrt(in)), PEFT's default (kaiming_uniform with a = sqrt(5)), or normal with
    deviation 1 / rank (PEFT's "gaussian"); B is zero.
    """
    if "lora_A" not in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{args.seed} {name}".encode()))
    if args.lora_init == "gaussian":
        return torch.randn(shape, generator=generator) / shape[0]
    return (2 * torch.rand(shape, generator=generator) - 1) / shape[1] ** 0.5


def _layers(chunk: nn.Module, by_base: dict[str, list[Pair]]) -> Iterator[tuple[str, list[list[Pair]]]]:
    """Yield (name of the layer in the chunk, adapters of each expert that the layer holds)."""
    found: dict[str, list[list[Pair]]] = {}
    for name, parameter in chunk.named_parameters():
        for canonical, _ in model_weights.canonical(chunk, name, parameter):
            if canonical in by_base:
                found.setdefault(name.rsplit(".", 1)[0], []).append(by_base[canonical])
    yield from found.items()


def _hook(layer: Any, adapter: Adapter) -> None:
    """Add the adapter's output to that of the layer's matrix product."""
    fused_norm = hasattr(layer, "layer_norm_weight")
    if fused_norm:  # Transformer Engine's layer then returns the input of its matrix product, too
        layer.return_layernorm_output = True

    def add(_: nn.Module, inputs: tuple, out: Any) -> Any:
        x = inputs[0]
        if fused_norm:  # ((output, x), None), or (output, bias, x)
            (output, x), bias = out if len(out) == 2 else ((out[0], out[2]), out[1])
        else:
            output, bias = out if isinstance(out, tuple) else (out, None)
        if adapter.enabled:
            added = None if bias is not None else getattr(layer, "bias", None)  # to the output already
            output = adapter(x, output, added, _experts(x, inputs[1:]) if adapter.grouped else ())
        return (output, bias) if fused_norm or isinstance(out, tuple) else output

    layer.register_forward_hook(add, prepend=True)  # before a norm of the output (Gemma 2, GLM-4)


def _experts(x: Tensor, inputs: tuple) -> tuple[Tensor, Tensor]:
    """Return (ends, idle) of `grouped_matmul` from the further inputs of a layer of several experts."""
    if isinstance(inputs[0], Tensor) and inputs[0].dtype == torch.int32:  # models/experts.py
        return inputs[0], inputs[1]
    counts = torch.as_tensor(inputs[0])  # Transformer Engine: tokens of each expert
    ends, idle = counts.cumsum(0).int(), (counts == 0).nonzero()[:, 0]
    return ends.to(x.device, non_blocking=True), idle.to(x.device, non_blocking=True)


def _gating(adapter: Adapter, x: Tensor, logits: Tensor, bias: Tensor | None) -> Tensor:
    return adapter(x.to(logits.dtype), logits, bias) if adapter.enabled else logits


def _require_gradient(_: nn.Module, __: tuple, output: Tensor) -> None:
    """Let the first layer's input require a gradient: recomputed layers, and stages, have none without it."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
