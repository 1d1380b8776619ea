"""Plan of a weight sync: which elements of which trainer rank's shards each engine rank receives.

Two halves meet in the elements of the Hugging Face tensors. The trainer's half is the family's table: `Weight.slices`
says which lines of which tensors a shard consists of. The engine's half is a list of boxes of each tensor (`Needs`),
which the engine derives from its own loaders. Their intersections are the pieces that are sent.

A shard has several holders (data- and context-parallel replicas). For each engine rank the pieces of all shards with
the same holders are taken in the order of the table, and the holder with the fewest bytes up to there sends the next.
Each holder thus sends the same number of bytes up to any piece, give or take a piece, and every rank knows who sends
without a message. An engine rank on a trainer's device reads that trainer's own shards in place, and receives others
from its host where it can.

The sync has rounds of consecutive weights, in which an engine rank receives at most ``limit`` bytes and a holder sends
on average at most as many. The shards that it reads have at most `SHARDS` times as many: they are copies if they are
merged with an adapter or stored in 8 bits. In each step of the sync the replicas of an engine are in rounds of
different pipeline stages, so that all stages send. If there are more replicas than stages, several are in one round,
and other holders send to each. No process group is used here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import accumulate, groupby
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron_grpo.weights.parameter_mapping import Slice, Weight, not_in_the_model

Box = tuple[tuple[int, int], ...]  # (first, end) along each axis of a Hugging Face tensor
Needs = Sequence[Sequence[Box]]  # of each tensor of `hf_tensors`; boxes can overlap
ROUND_BYTES = 128 * 2**20  # two rounds are under way at a time
SHARDS = 4  # an engine of more ranks than a trainer receives parts of larger shards
PIECE_BYTES = 16 * 2**20  # a larger piece is divided, for the balance of the holders


class HfTensor(NamedTuple):
    """A Hugging Face tensor of a sync."""

    name: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def hf_tensors(weights: Sequence[Weight], params: torch.dtype) -> list[HfTensor]:
    """Return the Hugging Face tensors of ``weights``; ``params``: dtype of the weights without one of their own.

    They are in the order of the table; a tensor of all experts has the place of the first expert.
    """
    found = {
        name: HfTensor(name, weight.dtype or params, torch.Size(shape))
        for weight in weights
        for name, shape in weight.hf.items()
    }
    return list(found.values())


def whole(tensors: Sequence[HfTensor]) -> Needs:
    """Return the needs of an engine that reads whole tensors."""
    return [[tuple((0, size) for size in tensor.shape)] for tensor in tensors]


class Reads(NamedTuple):
    """What an engine rank reads of Hugging Face tensors.

    ``targets``, for each tensor: where its boxes are in the engine's parameters, each [box's shape]. None for a tensor
    that the engine's loaders must have.
    """

    needs: Needs
    targets: Sequence[Mapping[Box, Sequence[torch.Tensor]] | None]

    @classmethod
    def of_loaders(cls, needs: Needs) -> Reads:
        """Return the reads of an engine whose loaders must have all tensors."""
        return cls(needs, [None] * len(needs))


@dataclass(frozen=True)
class Holder:
    """What one trainer rank holds: ``held`` [weights] says which weights, and the rest which shards of them."""

    held: npt.NDArray[np.bool_]
    stage: int  # of the pipeline
    tp: tuple[int, int]  # (rank, size) of the tensor parallelism
    expert_tp: tuple[int, int]  # of experts
    host: int = 0


class Piece(NamedTuple):
    """Elements of a Hugging Face tensor that lie in one shard.

    ``spot`` is their place in the shard, with the axes in the order of the Hugging Face tensor, and ``place`` that in
    the Hugging Face tensor. Both give a tensor of ``shape``.
    """

    weight: int  # number in the table
    tensor: int  # number of the Hugging Face tensor
    spot: tuple[slice, ...]
    place: tuple[int | slice, ...]
    shape: tuple[int, ...]
    nbytes: int


class Round(NamedTuple):
    """Consecutive weights, and the Hugging Face tensors that they complete."""

    weights: range
    tensors: range


class Plan:
    """Plan of a sync of ``weights``, whose Hugging Face ``tensors`` are those of `hf_tensors`.

    All ranks make it from equal arguments. ``holders``: of the trainer ranks, in their order. ``needs``: of the engine
    ranks, in their order. ``homes``: for each engine rank, the trainer rank that has the same device, or None; by
    default none has. A replica of an engine has ``width`` ranks.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        tensors: Sequence[HfTensor],
        holders: Sequence[Holder],
        needs: Sequence[Needs],
        limit: int = ROUND_BYTES,
        homes: Sequence[int | None] | None = None,
        width: int = 1,
    ):
        self.weights, self.tensors, self.holders, self.needs = weights, tensors, holders, needs
        self._homes = homes or [None] * len(needs)
        self._limit, self._width = limit, width
        self._number = {tensor.name: number for number, tensor in enumerate(self.tensors)}
        self._near: dict[tuple[int, int], tuple[int, ...]] = {}
        self._newest: Needs = ()  # those that `_known` is about
        self._known: dict[tuple[int, int, int | None], list[list[Piece]]] = {}  # `_parts`

    @cached_property
    def shards(self) -> list[list[tuple[int, int]]]:
        """For each weight (tensor-parallel rank, number in `groups`) of each shard: its holders are the group's.

        Copies in later pipeline stages are not used. GrpoError for a weight that no trainer rank holds.
        """
        held = np.stack([holder.held for holder in self.holders], 1)
        numbers: dict[tuple[int, ...], int] = {}
        known: dict[tuple[bytes, bool, bool], list[tuple[int, int]]] = {}
        found = []
        for number, weight in enumerate(self.weights):
            key = held[number].tobytes(), weight.expert is None, weight.axis is None
            if key not in known:
                ranks = np.flatnonzero(held[number]).tolist()
                if not ranks:
                    raise not_in_the_model(weight)
                stage = min(self.holders[rank].stage for rank in ranks)
                by_shard: dict[int, list[int]] = {}
                for rank in ranks:
                    if self.holders[rank].stage == stage:
                        by_shard.setdefault(self._place(rank, weight)[0], []).append(rank)
                known[key] = [
                    (place, numbers.setdefault(tuple(of_shard), len(numbers)))
                    for place, of_shard in sorted(by_shard.items())
                ]
            found.append(known[key])
        self._groups = list(numbers)
        return found

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The trainer ranks of each group of holders."""
        assert self.shards is not None
        return self._groups

    @cached_property
    def _of_group(self) -> list[list[tuple[int, int]]]:
        """For each group of holders the shards that it has: (number of the weight, tensor-parallel rank)."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.groups]
        for number, shards in enumerate(self.shards):
            for place, group in shards:
                found[group].append((number, place))
        return found

    @cached_property
    def _of_rank(self) -> dict[int, list[int]]:
        """For each trainer rank the groups of holders that it is in."""
        found: dict[int, list[int]] = defaultdict(list)
        for group, ranks in enumerate(self.groups):
            for rank in ranks:
                found[rank].append(group)
        return found

    def owned(self, rank: int) -> set[int]:
        """Return the numbers of the weights whose pieces trainer rank ``rank`` can send."""
        return {number for group in self._of_rank[rank] for number, _ in self._of_group[group]}

    def _place(self, rank: int, weight: Weight) -> tuple[int, int]:
        """Return (rank, size) of the tensor parallelism of a weight on a trainer rank; (0, 1) if it has no shards."""
        holder = self.holders[rank]
        if weight.axis is None:
            return 0, 1
        return holder.tp if weight.expert is None else holder.expert_tp

    def pieces(self, engine: int, rank: int | None = None) -> list[tuple[int, Piece]]:
        """Return (trainer rank, piece) of all that engine rank ``engine`` receives, in the order of the table.

        ``rank``: only from this trainer rank.
        """
        # Other holders begin for each rank of an engine, and for each of the replicas that are in a round together.
        replica, place = divmod(engine, self._width)
        sent = []
        for group in range(len(self.groups)) if rank is None else self._of_rank[rank]:
            senders = self._senders(group, engine)
            if rank is None or rank in senders:
                turn = place + replica // self._turns * len(senders) // self._together
                for part, pieces in enumerate(self._parts(group, engine)):
                    sender = senders[(part + turn) % len(senders)]
                    if rank is None or sender == rank:
                        sent += [(sender, piece) for piece in pieces]
        return sorted(sent, key=lambda found: found[1].weight)

    def _senders(self, group: int, engine: int) -> tuple[int, ...]:
        """Return the holders of a group that send to an engine rank."""
        home = self._homes[engine]
        if home is None:
            return self.groups[group]
        if (group, home) not in self._near:
            ranks, host = self.groups[group], self.holders[home].host
            of_host = tuple(rank for rank in ranks if self.holders[rank].host == host)
            self._near[group, home] = (home,) if home in ranks else of_host or ranks
        return self._near[group, home]

    def _parts(self, group: int, engine: int) -> list[list[Piece]]:
        """Return what an engine rank receives of a group's shards, as one part for each sender, of about equal bytes.

        Replicas receive the same: the parts for the newest needs are kept.
        """
        senders = self._senders(group, engine)
        limit = None if senders == (self._homes[engine],) else PIECE_BYTES
        if self._newest is not self.needs[engine]:
            self._newest, self._known = self.needs[engine], {}
        key = group, len(senders), limit
        if key not in self._known:
            parts = self._known[key] = [[] for _ in senders]
            least = [(0, part) for part in range(len(senders))]  # a heap: (bytes, part)
            for piece in self._pieces_of(group, self.needs[engine], limit):
                nbytes, part = least[0]
                parts[part].append(piece)
                heapreplace(least, (nbytes + piece.nbytes, part))
        return self._known[key]

    def _pieces_of(self, group: int, needs: Needs, limit: int | None) -> Iterator[Piece]:
        """Yield the pieces of a group's shards that are needed; ``limit``: bytes of a piece."""
        rank = self.groups[group][0]
        for number, place in self._of_group[group]:
            weight = self.weights[number]
            for source, name in enumerate(weight.hf):
                tensor = self._number[name]
                for box in needs[tensor]:
                    size = self._place(rank, weight)[1]
                    itemsize = self.tensors[tensor].dtype.itemsize
                    for index, spot in overlaps(weight, source, place, size, box):
                        yield from _divided(number, tensor, index, spot, itemsize, limit)

    @cached_property
    def rounds(self) -> list[Round]:
        """The rounds of the sync, by pipeline stages, and empty ones at the end: see `round_of_step`."""
        found = sorted(self._rounds(), key=lambda part: self._stage(part.weights))
        longest = max(Counter(self._stage(part.weights) for part in found).values(), default=0)
        end = Round(range(len(self.weights), len(self.weights)), range(len(self.tensors), len(self.tensors)))
        return found + [end] * (longest * self._turns - len(found))

    def _stage(self, weights: range) -> int:
        """Return the pipeline stage that sends a round's weights; 0 if the stages do not take turns."""
        _, group = self.shards[weights.start][0]
        return 0 if self._turns == 1 else self.holders[self.groups[group][0]].stage

    @cached_property
    def _replicas(self) -> int:
        return ceil(len(self.needs) / self._width)

    @cached_property
    def _turns(self) -> int:
        """Number of different rounds in which replicas are at a time.

        Stages without a weight of this sync have no turn: all ranks have an adapter, and those of stage 0 send it.
        """
        return min(len({self.holders[ranks[0]].stage for ranks in self.groups}), self._replicas)

    @cached_property
    def _together(self) -> int:
        """Largest number of replicas that are in the same round at a time."""
        return ceil(self._replicas / self._turns)

    def round_of_step(self, engine: int, step: int) -> int:
        """Return the number of the round in which an engine rank is in a step of the sync; it has a step for each.

        The rounds of different turns are at least as far apart as a stage has rounds: each stage sends one at a time.
        """
        turn = engine // self._width % self._turns
        return (step + turn * len(self.rounds) // self._turns) % len(self.rounds)

    def _rounds(self) -> Iterator[Round]:
        alike = Counter(map(id, self.needs))  # ranks of equal places in their replicas share their needs
        distinct = list({id(needs): needs for needs in self.needs}.values())
        # Bytes that a rank of each kind receives up to each tensor, and all ranks together.
        received = np.zeros((len(self.tensors) + 1, len(distinct)), np.int64)
        for kind, needs in enumerate(distinct):
            for number, boxes in enumerate(needs, start=1):
                received[number, kind] = sum(map(_volume, boxes)) * self.tensors[number - 1].dtype.itemsize
        received = received.cumsum(0)
        of_all = (received * [alike[id(needs)] for needs in distinct]).sum(1).tolist()
        first = Round(range(0), range(0))  # of the round that grows
        sent, read = defaultdict[int, float](float), defaultdict[int, int](int)  # by each holder of a group
        grown, largest = first, 0.0  # bytes that a holder sends of one weight
        for weights, tensors in self._closed():
            groups = {group for number in weights for _, group in self.shards[number]}
            holders = sum(len(self.groups[group]) for group in groups)
            share = (of_all[tensors.stop] - of_all[tensors.start]) * self._together / self._replicas / holders
            most = max(sent[group] for group in groups) + share
            # With many engines a single weight can exceed the limit; other holders send theirs in the same round.
            limit = max(self._limit, largest, share)
            held = (received[tensors.stop] - received[grown.tensors.start]).max()
            shards = self._shard_bytes(weights)
            of_shards = max(read[group] + nbytes for group, nbytes in shards.items())
            full = held > self._limit or most > limit or of_shards > SHARDS * self._limit
            if grown.weights and (full or self._stage(weights) != self._stage(grown.weights)):
                yield grown
                first, sent, read, largest = Round(weights, tensors), defaultdict(float), defaultdict(int), 0.0
            largest = max(largest, share)
            grown = Round(range(first.weights.start, weights.stop), range(first.tensors.start, tensors.stop))
            for group in groups:
                sent[group] += share
                read[group] += shards[group]
        if grown.weights:
            yield grown

    def _shard_bytes(self, weights: range) -> dict[int, int]:
        """Return the bytes of the shards of ``weights`` that each group of holders has."""
        found: dict[int, int] = {}
        for number in weights:
            weight, shards = self.weights[number], self.shards[number]
            tensors = [self.tensors[self._number[name]] for name in weight.hf]
            nbytes = sum(tensor.nbytes // (tensor.shape[0] if weight.all_experts else 1) for tensor in tensors)
            for _, group in shards:
                found[group] = found.get(group, 0) + nbytes // len(shards)
        return found

    def _closed(self) -> Iterator[tuple[range, range]]:
        """Yield the shortest runs of weights that complete their tensors, with the numbers of these."""
        missing: Counter[str] = Counter()  # experts of tensors of all experts
        first = tensor = end = 0
        for number, weight in enumerate(self.weights):
            for name, shape in weight.hf.items():
                end = max(end, self._number[name] + 1)
                if weight.all_experts:
                    missing[name] = missing.get(name, shape[0]) - 1
            if not any(missing.values()):
                yield range(first, number + 1), range(tensor, end)
                first, tensor, missing = number + 1, end, Counter()


def overlaps(
    weight: Weight, source: int, tp_rank: int, tp_size: int, box: Box
) -> Iterator[tuple[tuple[slice, ...], tuple[int | slice, ...]]]:
    """Yield (place in a shard, place in Hugging Face tensor ``source``) of the shard's elements that lie in ``box``.

    The first has the axes in the order of the Hugging Face tensor; the second has the expert's number first if the
    tensor has all experts.
    """
    front: tuple[int, ...] = ()
    if weight.all_experts:
        assert weight.expert is not None
        if not box[0][0] <= weight.expert < box[0][1]:
            return
        front, box = (weight.expert,), box[1:]
    axis = weight.lines_axis
    if weight.transposed and axis >= len(box) - 2:
        axis = 2 * len(box) - 3 - axis
    if any(first >= end for first, end in box):
        return
    slices = weight.slices(tp_rank, tp_size)
    offsets = accumulate((span.lines for span in slices), initial=0)
    for offset, span in zip(offsets, slices, strict=False):
        if span.source != source:
            continue
        first, end = _within(span, *box[axis])
        if first < end:
            lines = slice(span.start + first * span.step, span.start + (end - 1) * span.step + 1, span.step)
            others = [slice(*bounds) for bounds in box]
            index, place = list(others), list(others)
            index[axis], place[axis] = slice(offset + first, offset + end), lines
            yield tuple(index), (*front, *place)


def _within(span: Slice, first: int, end: int) -> tuple[int, int]:
    """Return (first, end) of the positions in a slice whose lines are in range(first, end)."""
    low = max(0, ceil((first - span.start) / span.step))
    return low, min(span.lines, ceil((end - span.start) / span.step))


def _divided(
    weight: int, tensor: int, index: tuple[slice, ...], place: tuple[int | slice, ...], itemsize: int, limit: int | None
) -> Iterator[Piece]:
    """Yield a piece; one above ``limit`` bytes as several, along its first axis."""
    shape = tuple(part.stop - part.start for part in index)
    rows, row_bytes = shape[0], prod(shape[1:]) * itemsize
    parts = 1 if limit is None else ceil(rows / max(1, limit // row_bytes))
    front = place[: len(place) - len(shape)]
    spot = place[len(front)]
    assert isinstance(spot, slice)
    step = spot.step or 1
    for number in range(parts):
        first, end = rows * number // parts, rows * (number + 1) // parts
        mine = slice(index[0].start + first, index[0].start + end)
        lines = slice(spot.start + first * step, spot.start + (end - 1) * step + 1, step)
        of_part = (end - first, *shape[1:])
        size = prod(of_part) * itemsize
        yield Piece(weight, tensor, (mine, *index[1:]), (*front, lines, *place[len(front) + 1 :]), of_part, size)


def _volume(box: Box) -> int:
    return prod(max(0, end - first) for first, end in box)


# ---- messages


def to_rows(needs: Needs, axes: int) -> npt.NDArray[np.int64]:
    """Return needs as numbers [boxes, 1 + 2 axes]: the tensor's number, then its box, for tensors of up to ``axes``."""
    rows = np.zeros((sum(map(len, needs)), 1 + 2 * axes), np.int64)
    numbered = ((number, box) for number, boxes in enumerate(needs) for box in boxes)
    for row, (number, box) in zip(rows, numbered, strict=True):
        row[: 1 + 2 * len(box)] = number, *(bound for bounds in box for bound in bounds)
    return rows


def from_rows(rows: npt.NDArray[np.int64], tensors: Sequence[HfTensor]) -> list[list[Box]]:
    """Undo `to_rows`."""
    nothing: list[Box] = []  # of most tensors, since an engine rank has few experts
    needs = [nothing] * len(tensors)
    for number, boxes in groupby(rows.tolist(), key=lambda row: row[0]):
        ends = 1 + 2 * len(tensors[number].shape)
        needs[number] = [tuple(zip(box[1:ends:2], box[2:ends:2], strict=True)) for box in boxes]
    return needs
