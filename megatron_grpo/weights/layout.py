"""How one Megatron parameter is made of Hugging Face tensors: index permutations along one axis, as data.

Call the slices of a tensor along an axis its lines (rows for axis 0, columns for axis 1). A *layout* lists, in order,
the runs of Hugging Face lines that the full Megatron tensor consists of; tensor-parallel rank r of n owns the r-th of n
equal cuts of that list. Nothing else is known about a parameter, and everything follows from it: which bytes a rank
reads, its shard, the full tensor, and, backwards, the Hugging Face tensors from the shards of all ranks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_grpo.errors import GrpoError


class Piece(NamedTuple):
    """Lines [start, stop) of Hugging Face tensor number `source`; `source` None: lines of padding."""

    source: int | None
    start: int
    stop: int


# (lines of each Hugging Face tensor, tensor-parallel size, the model's dimensions) -> lines of the full Megatron tensor
Layout = Callable[[Sequence[int], int, Mapping[str, int]], list[Piece]]


def same(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Piece]:
    """One Hugging Face tensor, line for line."""
    return [Piece(0, 0, lines[0])]


def stacked(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Piece]:
    """Tensors stacked within every tensor-parallel rank: [gate_0; up_0; gate_1; up_1; ...] for `linear_fc1`."""
    chunks = [_divide(n, tp_size) for n in lines]
    return [Piece(i, rank * n, (rank + 1) * n) for rank in range(tp_size) for i, n in enumerate(chunks)]


def grouped_qkv(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Piece]:
    """q, k, v interleaved by query group for `linear_qkv`: the group's query heads, its key head, its value head."""
    groups = dims["groups"]
    chunks = [_divide(n, groups) for n in lines]
    return [Piece(i, group * n, (group + 1) * n) for group in range(groups) for i, n in enumerate(chunks)]


def vocabulary(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Piece]:
    """One line per token, padded at the end to dims["padded_vocab"] lines."""
    padding = dims["padded_vocab"] - lines[0]
    if padding < 0:
        raise GrpoError(f"padded_vocab_size ({dims['padded_vocab']}) is smaller than vocab_size ({lines[0]})")
    return [Piece(0, 0, lines[0])] + ([Piece(None, 0, padding)] if padding else [])


# (arguments, number of the decoder layer, None for a row outside the layers) -> whether the model has the row there
Condition = Callable[[Namespace, int | None], bool]


def always(args: Namespace, layer: int | None) -> bool:
    """A row of every model, in every layer."""
    return True


def untied(args: Namespace, layer: int | None) -> bool:
    """A row of models whose input and output embeddings are separate parameters."""
    return args.untie_embeddings_and_output_weights


@dataclass(frozen=True)
class Row:
    """One line of a family's table: a Megatron name pattern and the Hugging Face tensors that it is made of.

    `mcore` is the name in GPTModel with the local spec; "{layer}" stands for the layer's number, from 0, counted over
    the whole model, "{expert}" for the expert's, counted over all expert-parallel ranks, and "{mtp}" for that of the
    multi-token-prediction layer. `hf` maps Hugging Face name patterns, in the layout's order, to shapes spelled in
    dimension names (mapping.dimensions): {"model.embed_tokens.weight": "vocab hidden"}. `axis` is the axis that tensor
    parallelism splits (an expert's own, for a row with "{expert}") and that the layout speaks of; None: every rank
    holds the whole (and the layout speaks of axis 0). `when`: which models and layers have it. `dtype`: None for that
    of the model's parameters.
    """

    mcore: str
    hf: Mapping[str, str]
    layout: Layout = same
    axis: int | None = None
    when: Condition = always
    dtype: torch.dtype | None = None

    def weight(self, dims: Mapping[str, int], **numbers: int) -> Weight:
        """The row for one layer, expert or multi-token-prediction layer of a model with dimensions `dims`."""
        return Weight(
            name=self.mcore.format(**numbers),
            hf={name.format(**numbers): tuple(dims[d] for d in shape.split()) for name, shape in self.hf.items()},
            layout=self.layout,
            axis=self.axis,
            dims=dims,
            expert=numbers.get("expert"),
            dtype=self.dtype,
        )


@dataclass(frozen=True)
class Weight:
    """A row made concrete: one Megatron parameter, its Hugging Face names and shapes, and the way between them.

    `expert`: the number of the expert that it belongs to, None outside experts.
    """

    name: str
    hf: Mapping[str, tuple[int, ...]]
    layout: Layout
    axis: int | None
    dims: Mapping[str, int]
    expert: int | None = None
    dtype: torch.dtype | None = None

    @property
    def lines_axis(self) -> int:
        return self.axis or 0

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        """The lines that the shard of rank `tp_rank` of `tp_size` consists of, in order."""
        if self.axis is None:
            tp_rank, tp_size = 0, 1
        try:
            order = self.layout([shape[self.lines_axis] for shape in self.hf.values()], tp_size, self.dims)
            share = _divide(sum(stop - start for _, start, stop in order), tp_size)
        except GrpoError as error:
            raise GrpoError(f"{self.name} cannot be laid out for tensor-parallel size {tp_size}: {error}") from None
        return _cut(order, tp_rank * share, (tp_rank + 1) * share)

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of the parameter on each of `tp_size` ranks; `shard_shape(1)` is that of the full Megatron tensor."""
        shape = list(next(iter(self.hf.values())))
        shape[self.lines_axis] = sum(stop - start for _, start, stop in self.pieces(0, tp_size))
        return tuple(shape)

    def fill(self, shard: Tensor, tp_rank: int, tp_size: int, read: Callable[[str, int, int, int], Tensor]) -> None:
        """Write rank `tp_rank`'s shard in place (dtype converted, padding zero), one read per Hugging Face tensor.

        `read(name, axis, start, stop)` returns lines [start, stop) along `axis` of the Hugging Face tensor `name`.
        """
        axis, pieces = self.lines_axis, self.pieces(tp_rank, tp_size)
        places = _offsets(pieces)
        for source, name in enumerate(self.hf):
            mine = [(offset, piece) for offset, piece in zip(places, pieces, strict=True) if piece.source == source]
            if not mine:
                continue
            first, last = min(p.start for _, p in mine), max(p.stop for _, p in mine)
            block = read(name, axis, first, last)
            for offset, (_, start, stop) in mine:
                shard.narrow(axis, offset, stop - start).copy_(block.narrow(axis, start - first, stop - start))
        for offset, piece in zip(places, pieces, strict=True):
            if piece.source is None:
                shard.narrow(axis, offset, piece.stop - piece.start).zero_()

    def split(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors, in the order of `hf`, from the shards of all ranks (may be views of the shards)."""
        shards = shards if self.axis is not None else shards[:1]
        found: list[list[tuple[int, Tensor]]] = [[] for _ in self.hf]
        for rank, shard in enumerate(shards):
            pieces = self.pieces(rank, len(shards))
            for offset, (source, start, stop) in zip(_offsets(pieces), pieces, strict=True):
                if source is not None:
                    found[source].append((start, shard.narrow(self.lines_axis, offset, stop - start)))
        ordered = [[part for _, part in sorted(parts, key=lambda item: item[0])] for parts in found]
        return [parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.lines_axis) for parts in ordered]

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        """The full Megatron tensor, as one rank holds it, from the Hugging Face tensors in the order of `hf`."""
        by_name = dict(zip(self.hf, tensors, strict=True))
        full = tensors[0].new_empty(self.shard_shape(1))
        self.fill(full, 0, 1, lambda name, axis, start, stop: by_name[name].narrow(axis, start, stop - start))
        return full


def _cut(pieces: list[Piece], first: int, last: int) -> list[Piece]:
    """What lies at positions [first, last) of the concatenated pieces."""
    out = []
    for offset, (source, start, stop) in zip(_offsets(pieces), pieces, strict=True):
        low, high = max(first - offset, 0), min(last - offset, stop - start)
        if low < high:
            out.append(Piece(source, start + low, start + high))
    return out


def _offsets(pieces: list[Piece]) -> list[int]:
    """The position of each piece's first line in their concatenation."""
    offsets = [0]
    for _, start, stop in pieces:
        offsets.append(offsets[-1] + stop - start)
    return offsets[:-1]


def _divide(lines: int, parts: int) -> int:
    if lines % parts:
        raise GrpoError(f"{lines} lines cannot be divided into {parts} equal parts")
    return lines // parts
