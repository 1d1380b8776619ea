"""Iterate over an adapter, or over the weights merged with it, as full Hugging Face tensors."""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_grpo.lora.attach import adapters, local_adapter
from megatron_grpo.lora.layers import Adapter
from megatron_grpo.lora.table import adapter_table
from megatron_grpo.lora.targets import saved_weights
from megatron_grpo.models.config import params_dtype
from megatron_grpo.weights.stream import WeightStream, local_shards, stream_shards, stream_weights

MERGED_BYTES = 128 * 2**20  # of float32: experts that are merged together


def stream_adapter(model_chunks: Sequence[nn.Module], args: Namespace) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of every matrix, on every rank in the order of `adapter_table`. Collective.

    The names are PEFT's without the prefix ``base_model.model.``: model.layers.0.self_attn.q_proj.lora_A.weight. Every
    rank must iterate to the end. The tensors may be views of the parameters: copy a tensor to keep it. The weights of
    --lora-modules-to-save are not among them.
    """
    local = {weight.name: tensor for weight, tensor in local_adapter(model_chunks)}
    yield from stream_weights(adapter_table(args), local, params_dtype(args))


def stream_saved(model_chunks: Sequence[nn.Module], args: Namespace) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of the weights that are trained whole. Collective, as `stream_adapter`."""
    yield from stream_weights(saved_weights(args), local_shards(model_chunks, args), params_dtype(args))


def stream_merged(model_chunks: Sequence[nn.Module], args: Namespace, *, only_trained: bool = False) -> WeightStream:
    """Return `weights.stream.stream_hf` with W + s B A in place of W, without a change of W."""
    return stream_shards(args, merged_shards(model_chunks, args), only_trained)


def merged_shards(model_chunks: Sequence[nn.Module], args: Namespace) -> Mapping[str, Tensor]:
    """Return this rank's tensors by the names of the family's table, with W + s B A in place of W.

    Each is merged when it is read, in float32, and rounded once. Experts of one layer are merged together.
    """
    places = {
        pairs[0].base.name: (adapter, place)
        for adapter in adapters(model_chunks)
        for place, pairs in enumerate(adapter.experts)
    }
    return _Merged(local_shards(model_chunks, args), places)


class _Merged(Mapping[str, Tensor]):
    """This rank's shards, merged when they are read.

    A mixture of experts has tens of thousands of small matrices. The next experts of the layer, of ``MERGED_BYTES`` in
    all, are merged with the one that is read, because `units` and the family's table have them in this order.
    """

    def __init__(self, local: Mapping[str, Tensor], places: Mapping[str, tuple[Adapter, int]]):
        self.local, self.places = local, places
        self._merged: dict[str, Tensor] = {}  # merged, but not read yet
        self._newest: tuple[Adapter, Factors] | None = None

    def __getitem__(self, name: str) -> Tensor:
        # Collective with DoRA: row-parallel layers add up their norms. All ranks of a group read in the same order.
        if name not in self.places:
            return self.local[name]
        if name not in self._merged:
            adapter, place = self.places[name]
            if self._newest is None or self._newest[0] is not adapter:
                self._newest = adapter, factors(adapter)
            count = max(1, MERGED_BYTES // (4 * self.local[name].numel()))
            names = [pairs[0].base.name for pairs in adapter.experts[place : place + count]]
            several = merged(adapter, self._newest[1], place, place + len(names))
            self._merged = dict(zip(names, several, strict=True))
        return self._merged.pop(name)

    def __contains__(self, name: object) -> bool:
        return name in self.local  # Mapping's method would merge

    def __iter__(self) -> Iterator[str]:
        return iter(self.local)

    def __len__(self) -> int:
        return len(self.local)


class Factors(NamedTuple):
    """A ``[experts, R, in]`` and B ``[experts, out, R]`` of a layer, and DoRA's factors of its rows or None."""

    down: Tensor
    up: Tensor
    rows: Tensor | None


@torch.no_grad()
def factors(adapter: Adapter) -> Factors:
    """Return an adapter's matrices with an axis of experts, in float32. Collective with DoRA."""
    down, up = adapter.matrices()
    rows = adapter.row_factors(down, up)
    if not adapter.grouped:
        down, up, rows = down[None], up[None], None if rows is None else rows[None]
    return Factors(down.float(), up.float(), rows)


@torch.no_grad()
def merged(adapter: Adapter, matrices: Factors, first: int, last: int) -> Tensor:
    """Return the shards W + s B A ``[last - first, out, in]`` of a layer's experts in W's dtype; DoRA scales rows."""
    weights, some = adapter.base_weights(first, last), slice(first, last)
    whole = torch.baddbmm(weights.float(), matrices.up[some], matrices.down[some], alpha=adapter.scale)
    if matrices.rows is not None:
        whole *= matrices.rows[some, :, None]
    return whole.to(weights.dtype)
