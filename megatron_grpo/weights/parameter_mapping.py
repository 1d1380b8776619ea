"""Bidirectional mapping between one Megatron parameter and its Hugging Face tensors: a permutation along one axis.

A *line* is one index along that axis: a row for axis 0, a column for axis 1. A *tensor layout* lists, in order, the
runs of Hugging Face lines that the full Megatron tensor consists of. Tensor-parallel rank r of n owns the r-th of n
equal parts of that list. Everything else is computed from the layout: the bytes that a rank reads, its shard, the full
tensor, the position of each element in the files, and the inverse, the Hugging Face tensors from the shards of all
ranks.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_grpo.utils.errors import GrpoError


class Dimensions(dict[str, int]):
    """Sizes of a model by name; hashable, so do not modify an instance that is in use."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.values()))


class Slice(NamedTuple):
    """Lines range(start, stop, step) of Hugging Face tensor number `source`; with `source` None, lines of padding."""

    source: int | None
    start: int
    stop: int
    step: int = 1

    @property
    def lines(self) -> int:
        return len(range(*self[1:]))


# (lines of each Hugging Face tensor, tensor-parallel size, the model's dimensions) -> lines of the full Megatron tensor
Layout = Callable[[Sequence[int], int, Mapping[str, int]], list[Slice]]


def same(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Slice]:
    """Return the layout of one Hugging Face tensor, unchanged."""
    return [Slice(0, 0, lines[0])]


def stacked(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Slice]:
    """Return the layout of tensors stacked per tensor-parallel rank: [gate_0; up_0; gate_1; ...] (`linear_fc1`)."""
    chunks = [_divide(n, tp_size) for n in lines]
    return [Slice(i, rank * n, (rank + 1) * n) for rank in range(tp_size) for i, n in enumerate(chunks)]


def grouped_by(groups: str) -> Layout:
    """Return the layout of tensors that consist of so many groups, by their dimension name: for each, all its lines."""

    def grouped(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Slice]:
        return _grouped(lines, dims[groups])

    return grouped


# The layout of `linear_qkv`: for each query group its query heads, its key head and its value head.
grouped_qkv = grouped_by("groups")


def gated_qkv(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Slice]:
    """Return the layout of `linear_qkv` with an output gate: a group's query heads, their gates, its key, its value.

    The first tensor has the gate of each query head behind the head.
    """
    head, heads = dims["head"], range(dims["heads"])
    queries = [Slice(0, 2 * number * head, (2 * number + 1) * head) for number in heads]
    gates = [Slice(0, (2 * number + 1) * head, (2 * number + 2) * head) for number in heads]
    of_group = _divide(len(heads), dims["groups"])
    found = []
    for group in range(dims["groups"]):
        own = slice(group * of_group, (group + 1) * of_group)
        found += [*queries[own], *gates[own], *(Slice(i, group * head, (group + 1) * head) for i in (1, 2))]
    return found


def by_key_heads(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Slice]:
    """Return the layout of a recurrent layer: for each key head (Mamba-2: group) its equal part of every tensor."""
    return _grouped(lines, dims["linear_key_heads"])


def _grouped(lines: Sequence[int], groups: int) -> list[Slice]:
    chunks = [_divide(n, groups) for n in lines]
    return [Slice(i, group * n, (group + 1) * n) for group in range(groups) for i, n in enumerate(chunks)]


def interleaved(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Slice]:
    """Return the `stacked` layout of one tensor: even lines are the gate projection, odd lines the up projection."""
    share = 2 * _divide(lines[0], 2 * tp_size)
    return [Slice(0, rank * share + odd, (rank + 1) * share, 2) for rank in range(tp_size) for odd in (0, 1)]


def fused(layout: Layout, *parts: str) -> Layout:
    """Return `layout` for one tensor that concatenates several; `parts`: dimension name of each one's lines."""

    def in_one(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Slice]:
        sizes = [dims[part] for part in parts]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            Slice(0, starts[source] + start, starts[source] + stop, step)
            for source, start, stop, step in layout(sizes, tp_size, dims)
            if source is not None
        ]

    in_one.__name__ = f"fused {layout.__name__}"
    return in_one


def vocabulary(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Slice]:
    """Return the layout of one line per token, padded at the end to dims["padded_vocab"] lines."""
    padding = dims["padded_vocab"] - lines[0]
    if padding < 0:
        raise GrpoError(f"padded_vocab_size ({dims['padded_vocab']}) is smaller than vocab_size ({lines[0]})")
    return [Slice(0, 0, lines[0])] + ([Slice(None, 0, padding)] if padding else [])


# Reads tensor[index] of a Hugging Face tensor by its name, where `index` has an integer or a slice for each axis.
Read = Callable[[str, tuple[int | slice, ...]], Tensor]

# (arguments, number of the decoder layer, None outside the layers) -> whether the model has this parameter there
Condition = Callable[[Namespace, int | None], bool]


def always(args: Namespace, layer: int | None) -> bool:
    """Return True: every model has the parameter, in every layer."""
    return True


def untied(args: Namespace, layer: int | None) -> bool:
    """Return whether input and output embeddings are separate parameters."""
    return args.untie_embeddings_and_output_weights


@dataclass(frozen=True)
class ParameterMapping:
    """Entry of a family's table: name patterns of a Megatron parameter and of its Hugging Face tensors.

    `mcore`: name in GPTModel with the local spec. "{layer}" is the layer's number from 0 in the whole model, "{expert}"
    the expert's number over all expert-parallel ranks, "{mtp}" the number of the multi-token-prediction layer.
    `hf`: Hugging Face name patterns, in the layout's order, -> shape as dimension names (model_weights.dimensions):
    {"model.embed_tokens.weight": "vocab hidden"}.
    `layout`: order of the Hugging Face lines in the Megatron tensor, along `axis`.
    `axis`: axis that tensor parallelism shards (expert tensor parallelism for an "{expert}" name); None: every rank has
    the full tensor, and the layout is along axis 0.
    `when`: condition for the models and layers that have the parameter.
    `dtype`: dtype of the parameter, None for the model's.
    `all_experts`: each Hugging Face tensor holds all experts of the layer, along an additional first axis.
    `transposed`: the last two axes are swapped in the Hugging Face tensors; `axis` and `layout` refer to the Megatron
    parameter.
    """

    mcore: str
    hf: Mapping[str, str]
    layout: Layout = same
    axis: int | None = None
    when: Condition = always
    dtype: torch.dtype | None = None
    all_experts: bool = False
    transposed: bool = False

    def weight(self, dims: Dimensions, **numbers: int) -> Weight:
        """Return the weight of one layer, expert or multi-token-prediction layer in a model with dimensions `dims`."""
        return Weight(
            name=self.mcore.format(**numbers),
            hf={name.format(**numbers): tuple(dims[d] for d in shape.split()) for name, shape in self.hf.items()},
            layout=self.layout,
            axis=self.axis,
            dims=dims,
            expert=numbers.get("expert"),
            dtype=self.dtype,
            all_experts=self.all_experts,
            transposed=self.transposed,
        )


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter with its Hugging Face names and shapes: a ParameterMapping with numbers filled in.

    `expert`: number of the expert that the parameter belongs to, None outside experts. Other fields: ParameterMapping.
    """

    name: str
    hf: Mapping[str, tuple[int, ...]]
    layout: Layout
    axis: int | None
    dims: Dimensions
    expert: int | None = None
    dtype: torch.dtype | None = None
    all_experts: bool = False
    transposed: bool = False

    @property
    def lines_axis(self) -> int:
        return self.axis or 0

    @property
    def _expert_index(self) -> tuple[int, ...]:
        """Return the index on the additional first axis of the Hugging Face tensors; () if there is none."""
        return (self.expert,) if self.all_experts and self.expert is not None else ()

    @functools.cached_property  # a weight sync needs it several times, for tens of thousands of weights
    def part_shapes(self) -> list[tuple[int, ...]]:
        """The shape of each Hugging Face tensor's part of this parameter, with the parameter's order of axes."""
        shapes = [shape[len(self._expert_index) :] for shape in self.hf.values()]
        return [(*shape[:-2], shape[-1], shape[-2]) for shape in shapes] if self.transposed else shapes

    @functools.cached_property
    def _shards(self) -> dict[tuple[int, int], Sequence[Slice]]:
        """`slices` by (rank, size), as far as they were asked for."""
        return {}

    def slices(self, tp_rank: int, tp_size: int) -> Sequence[Slice]:
        """Return the Hugging Face lines of the shard of rank `tp_rank` of `tp_size`, in order."""
        if self.axis is None:
            tp_rank, tp_size = 0, 1
        if (found := self._shards.get((tp_rank, tp_size))) is not None:
            return found
        lines = tuple(shape[self.lines_axis] for shape in self.part_shapes)
        try:
            return self._shards.setdefault((tp_rank, tp_size), _slices(self.layout, lines, tp_rank, tp_size, self.dims))
        except GrpoError as error:
            raise GrpoError(f"{self.name} cannot be sharded with tensor-parallel size {tp_size}: {error}") from None

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Return the shape of the parameter on each of `tp_size` ranks; `shard_shape(1)` is the full Megatron shape."""
        shape = list(self.part_shapes[0])
        shape[self.lines_axis] = sum(span.lines for span in self.slices(0, tp_size))
        return tuple(shape)

    def fill(self, shard: Tensor, tp_rank: int, tp_size: int, read: Read) -> None:
        """Fill rank `tp_rank`'s shard in place: convert the dtype, zero the padding, read each run of lines once."""
        axis, slices = self.lines_axis, self.slices(tp_rank, tp_size)
        placed = list(zip(_offsets(slices), slices, strict=True))
        for source, name in enumerate(self.hf):
            mine = sorted((span, offset) for offset, span in placed if span.source == source)
            for first, last, run in _runs(mine):
                block = read(name, self._index(len(shard.shape), first, last))
                block = block.mT if self.transposed else block
                for (_, start, stop, step), offset in run:
                    lines = _axis_slice(axis, slice(start - first, stop - first, step))
                    part = block[lines]
                    shard.narrow(axis, offset, part.shape[axis]).copy_(part)
        for offset, span in placed:
            if span.source is None:
                shard.narrow(axis, offset, span.lines).zero_()

    def _index(self, axes: int, first: int, last: int) -> tuple[int | slice, ...]:
        """Return the index of lines [first, last) of a part in its Hugging Face tensor."""
        axis = self.lines_axis
        if self.transposed:
            axis = {axes - 1: axes - 2, axes - 2: axes - 1}.get(axis, axis)
        index = [slice(None)] * axes
        index[axis] = slice(first, last)
        return (*self._expert_index, *index)

    def split(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the Hugging Face tensors, in the order of `hf`, from the shards of all tensor-parallel ranks.

        The results may be views of the shards. For tensors that hold all experts: this expert's part.
        """
        axis, shards = self.lines_axis, shards if self.axis is not None else shards[:1]
        if len(shards) == len(self.hf) == len(order := self.slices(0, 1)) == 1 and order[0].source is not None:
            return [shards[0].mT if self.transposed else shards[0]]
        found: list[list[tuple[Slice, Tensor]]] = [[] for _ in self.hf]
        for rank, shard in enumerate(shards):
            slices = self.slices(rank, len(shards))
            for offset, span in zip(_offsets(slices), slices, strict=True):
                if span.source is not None:
                    found[span.source].append((span, shard.narrow(axis, offset, span.lines)))
        whole = []
        for parts, shape in zip(found, self.part_shapes, strict=True):
            tensor = parts[0][1]
            spans = [span for span, _ in parts]
            if len(parts) > 1 and all(one.step == 1 and one.stop == two.start for one, two in pairwise(spans)):
                tensor = torch.cat([part for _, part in parts], axis)  # one kernel
            elif len(parts) > 1:
                tensor = tensor.new_empty(shape)
                for (_, start, stop, step), part in parts:
                    tensor[_axis_slice(axis, slice(start, stop, step))] = part
            whole.append(tensor.mT if self.transposed else tensor)
        return whole

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the full Megatron tensor (tensor-parallel size 1) from the tensors in the order of `hf`."""
        by_name = dict(zip(self.hf, tensors, strict=True))
        full = tensors[0].new_empty(self.shard_shape(1))
        self.fill(full, 0, 1, lambda name, index: by_name[name][index])
        return full

    def coordinates(self, positions: Tensor, tp_rank: int, tp_size: int) -> tuple[Tensor, Tensor]:
        """Return (number of the Hugging Face tensor, flat position in it) for elements of a shard.

        `positions`: flat positions in the shard of rank `tp_rank` of `tp_size`. Input and results are int64 `[n]`; the
        number of the tensor is -1 for padding.
        """
        slices = self.slices(tp_rank, tp_size)
        sources = torch.cat([torch.full([p.lines], -1 if p.source is None else p.source) for p in slices])
        lines = torch.cat([torch.arange(p.start, p.stop, p.step) for p in slices])
        at = list(torch.unravel_index(positions, self.shard_shape(tp_size)))
        source = sources[at[self.lines_axis]]
        at[self.lines_axis] = lines[at[self.lines_axis]]
        if self.transposed:
            at[-2:] = at[:-3:-1]
        at = [torch.full_like(positions, expert) for expert in self._expert_index] + at
        flat = torch.zeros_like(positions)
        for number, shape in enumerate(self.hf.values()):
            there = sum(index * prod(shape[axis + 1 :]) for axis, index in enumerate(at))
            flat = torch.where(source == number, there, flat)
        return source, flat


def not_in_the_model(weight: Weight) -> GrpoError:
    """Return the error for a weight of the family's table that no rank holds."""
    return GrpoError(
        f"the model has no parameter {weight.name}, which is in its family's table: a flag disables a part of the model"
    )


@functools.lru_cache(4096)  # the same for all layers and experts; a mixture of experts has tens of thousands
def _slices(layout: Layout, lines: tuple[int, ...], tp_rank: int, tp_size: int, dims: Dimensions) -> Sequence[Slice]:
    order = layout(lines, tp_size, dims)
    share = _divide(sum(span.lines for span in order), tp_size)
    return tuple(_joined(_cut(order, tp_rank * share, (tp_rank + 1) * share)))


def _axis_slice(axis: int, lines: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (lines,)


def _runs(slices: Sequence[tuple[Slice, int]]) -> Iterator[tuple[int, int, list[tuple[Slice, int]]]]:
    """Yield (first line, last line + 1, members) of each run of adjacent or overlapping slices; input is sorted."""
    run: list[tuple[Slice, int]] = []
    first = last = 0
    for span, offset in slices:
        if run and span.start > last:
            yield first, last, run
            run = []
        if not run:
            first = last = span.start
        run.append((span, offset))
        last = max(last, span.stop)
    if run:
        yield first, last, run


def _cut(slices: list[Slice], first: int, last: int) -> list[Slice]:
    """Return the slices at positions [first, last) of the concatenation of `slices`."""
    out = []
    for offset, span in zip(_offsets(slices), slices, strict=True):
        low, high = max(first - offset, 0), min(last - offset, span.lines)
        if low < high:
            start = span.start + low * span.step
            out.append(Slice(span.source, start, start + (high - 1 - low) * span.step + 1, span.step))
    return out


def _joined(slices: list[Slice]) -> Iterator[Slice]:
    """Yield the slices, adjacent lines of one tensor as one slice: each slice costs a copy."""
    newest: Slice | None = None
    for span in slices:
        if newest and (newest.source, newest.stop, newest.step, 1) == (span.source, span.start, 1, span.step):
            newest = newest._replace(stop=span.stop)
            continue
        if newest:
            yield newest
        newest = span
    if newest:
        yield newest


def _offsets(slices: Sequence[Slice]) -> list[int]:
    """Return the position of each slice's first line in the concatenation of all slices."""
    offsets = [0]
    for span in slices:
        offsets.append(offsets[-1] + span.lines)
    return offsets[:-1]


def _divide(lines: int, parts: int) -> int:
    if lines % parts:
        raise GrpoError(f"{lines} lines cannot be divided into {parts} equal parts")
    return lines // parts
