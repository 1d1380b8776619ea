"""Weights from trainer ranks to engine ranks: each engine rank receives the parts that it reads.

All ranks make the plan of the first sync of each kind together (`weights/transfer_plan.py`), from what the trainer
ranks hold and what the engine ranks need. Each round of it is one all-to-all exchange of bytes. A colocated engine
reads the shards of its own rank where they are, and a round in which all do so exchanges nothing.

Where the kernels of the engine use a parameter as it is loaded, the parts go straight into it. Other tensors go to the
engine's loaders as full Hugging Face tensors, of which only the parts that they read have been filled. So the kernels
of the engine and its own processing of the weights need no code here.

Every piece that is sent has a checksum: the sender computes it from the bytes that it sends, the receiver from the
engine's parameter, or from the bytes that the loaders are given. What a rank copies to its own engine is compared.
"""

import hashlib
import math
import os
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, compress, cycle
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo.lora.table import adapter_table
from megatron_grpo.models.config import params_dtype
from megatron_grpo.models.fp8_weight import plain
from megatron_grpo.parallel.exchange import concatenated
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.parallel.roles import Joint
from megatron_grpo.utils import progress
from megatron_grpo.utils.device import device
from megatron_grpo.weights import transfer_plan
from megatron_grpo.weights.parameter_mapping import Dimensions, Weight, same
from megatron_grpo.weights.stream import WeightStream, streamed, units
from megatron_grpo.weights.transfer_plan import Box, HfTensor, Holder, Needs, Piece, Plan, Reads

Weights = Iterator[tuple[str, torch.Tensor]]
ROW_BYTES = 4096  # a piece begins with a row of its buffer; checksums add up the words of 8 bytes of a row
CHECKSUM_BYTES = 16
SPACE_BYTES = 32 * 2**20  # memory for buffers is a multiple: the rounds of a model differ by a piece
ROWS = 2**14  # of a buffer that are added up at a time: 64 MiB


def table(args: Namespace, what: str) -> list[Weight]:
    """Return the weights of a sync: all "weights", "trained weights" (`streamed`), or an "adapter" in full.

    Experts are in the order of `units`: the experts of a round then come from all expert-parallel ranks.
    """
    if what != "adapter":
        weights = streamed(args, only_trained=what == "trained weights")
        return [weight for unit in units(weights, args.expert_model_parallel_size) for weight in unit]
    dtype = getattr(torch, args.vllm_dtype) if args.vllm_dtype else params_dtype(args)
    return undivided(transfer_plan.hf_tensors(adapter_table(args), dtype))


def kind_of(stream: WeightStream) -> str:
    """Return which weights of `table` a stream has."""
    return "trained weights" if stream.only_trained else "weights"


def other_bytes(what: str, version: int) -> str:
    """Return what `Transfer.differences` mean."""
    return f"the {what} of update {version} reached the engine with other bytes than the trainer sent"


def undivided(tensors: Sequence[HfTensor]) -> list[Weight]:
    """Return the weights of a model without shards that has these tensors."""
    return [Weight(name, {name: tuple(shape)}, same, None, Dimensions(), dtype=dtype) for name, dtype, shape in tensors]


class Links(NamedTuple):
    """The process groups of all ranks that send or receive."""

    host: Any  # gloo's
    weights: Any  # for tensors on ``device``
    device: torch.device | str

    @classmethod
    def of_launch(cls, joint: Joint) -> "Links":
        """Return the groups of trainers and engines on ranks of their own."""
        return cls(joint.group, joint.weights, "cpu" if isinstance(joint.weights, dist.ProcessGroupGloo) else device())

    @classmethod
    def of_trainers(cls) -> "Links":
        """Return the groups of trainers whose ranks have an engine each."""
        return cls(host_group(), dist.group.WORLD, device())


@dataclass
class _Traffic:
    """What this rank sends and receives in a step: pieces by the other's rank, and those of its own shards.

    ``tensors``: those that its engine completes. ``owned``: the weights whose shards a trainer rank may send. ``busy``:
    whether any rank sends to another one. ``mark``: the step's number, from 1, which is added to its checksums: in a
    buffer that nothing has reached, those of an earlier round would be right, or zeros.
    """

    mark: int
    tensors: range = range(0)
    owned: Sequence[int] = ()
    sent: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    received: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    own: list[Piece] = field(default_factory=list)
    busy: bool = True


_Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]  # dtype, shape, strides and offset of a view


class _Layout(NamedTuple):
    """Where pieces lie in a buffer: of each other rank, in their order, its pieces and then their checksums."""

    pieces: list[Piece]
    places: list[_Place]  # of each piece
    rows: torch.Tensor  # [2, pieces]: the first row of each, and the one after its last
    sums: list[_Place]  # of each rank's checksums [pieces, 2]
    nbytes: dict[int, int]  # of each rank
    placed: list[tuple[list[int], list[torch.Tensor]]]  # which pieces go into parameters, and where; again if to two
    passing: bool  # whether no piece is read after its round


class _Layouts(NamedTuple):
    """The layouts of a round."""

    sent: _Layout
    received: _Layout


class _Packed(NamedTuple):
    """A buffer with a layout, and views of its pieces and of each rank's checksums [n, 2]."""

    layout: _Layout
    whole: torch.Tensor
    parts: list[torch.Tensor]
    sums: list[torch.Tensor]

    @property
    def pieces(self) -> list[Piece]:
        return self.layout.pieces


class _Space(dict[_Place, torch.Tensor]):
    """Memory for one buffer after another, and its views. A view takes the host 1 us, and most layers' are equal."""

    def __init__(self, where: torch.device | str):
        super().__init__()
        self._memory = torch.empty(0, dtype=torch.uint8, device=where)

    def __missing__(self, place: _Place) -> torch.Tensor:
        dtype, shape, strides, first = place
        view = self[place] = self._memory.view(dtype).as_strided(shape, strides, first)
        return view

    def packed(self, layout: _Layout) -> _Packed:
        """Return a buffer with a layout. What a row has after its piece is the same at sender and receiver."""
        nbytes = sum(layout.nbytes.values())
        if not nbytes <= self._memory.nbytes <= 2 * max(nbytes, SPACE_BYTES):
            self._renew(0)  # first: both would be too much
            self._renew(-(-nbytes // SPACE_BYTES) * SPACE_BYTES)
        parts, sums = ([self[place] for place in places] for places in (layout.places, layout.sums))
        packed = _Packed(layout, self._memory[:nbytes], parts, sums)
        if not layout.passing:
            self._renew(0)
        return packed

    def _renew(self, nbytes: int) -> None:
        self.clear()
        self._memory = self._memory.new_empty(nbytes)


class _Exchange(NamedTuple):
    """A round under way. ``sent`` is read until ``work``, if there is any, has been waited for.

    ``own``: the pieces that this rank's engine reads of its trainer's shards.
    """

    traffic: _Traffic
    own: list[tuple[Piece, torch.Tensor]]
    sent: _Packed
    received: _Packed
    work: dist.Work | None


class Transfer:
    """The planned transfer of one kind of weights, on one of the ranks of ``links``. Collective over all of them."""

    def __init__(
        self,
        args: Namespace,
        links: Links,
        weights: Sequence[Weight],
        holder: Holder | None = None,
        reads: Callable[[Sequence[HfTensor]], Reads] | None = None,
    ):
        """Agree with all ranks on the plan.

        ``holder``: what this rank holds as a trainer. ``reads`` returns what its engine rank reads of tensors. A rank
        with a colocated engine has both.
        """
        self._links, rank = links, links.host.rank()
        tensors = transfer_plan.hf_tensors(weights, params_dtype(args))
        read = None if reads is None else reads(tensors)
        holders, trainers, needs, engines = _of_all_ranks(links.host, holder, read and read.needs, weights, tensors)
        homes = [trainers.index(of_engine) if of_engine in trainers else None for of_engine in engines]
        width = args.vllm_tensor_parallel_size
        plan = self._plan = Plan(weights, tensors, holders, needs, homes=homes, width=width)
        self._traffic = [_Traffic(number) for number in range(1, len(plan.rounds) + 1)]
        self._steps: dict[int, dict[int, _Traffic]] = {}  # by the first round: `_traffic_of`
        if holder is not None:
            own = trainers.index(rank)
            owned = plan.owned(own)
            rounds = [[number for number in part.weights if number in owned] for part in plan.rounds]
            alike = {plan.round_of_step(to, 0): to for to in range(len(engines))}.values()
            for step, traffic in enumerate(self._traffic):
                now = sorted(plan.round_of_step(to, step) for to in alike)
                traffic.owned = [number for part in now for number in rounds[part]]
            for to in sorted(range(len(engines)), key=lambda to: id(needs[to])):
                if engines[to] != rank:
                    traffic_of = self._traffic_of(to)
                    for _, piece in plan.pieces(to, own):
                        traffic_of[piece.weight].sent[engines[to]].append(piece)
        self._receives = read is not None
        self._targets: dict[int, list[torch.Tensor]] = {}  # of the pieces that go straight into parameters, by id
        self._direct: set[int] = set()  # tensors that consist of such pieces
        if read is not None:
            engine = engines.index(rank)
            for step, traffic in enumerate(self._traffic):
                traffic.tensors = plan.rounds[plan.round_of_step(engine, step)].tensors
            traffic_of = self._traffic_of(engine)
            for sender, piece in plan.pieces(engine):
                traffic, other = traffic_of[piece.weight], trainers[sender]
                (traffic.own if other == rank else traffic.received[other]).append(piece)
            self._find_targets(read)
        busy = torch.tensor([bool(traffic.sent or traffic.received) for traffic in self._traffic], dtype=torch.uint8)
        dist.all_reduce(busy, dist.ReduceOp.MAX, group=links.host)
        for traffic, one in zip(self._traffic, busy.tolist(), strict=True):
            traffic.busy = bool(one)
        self._layouts = [self._layouts_of(traffic) for traffic in self._traffic]
        self._checks: list[tuple[list[Piece], torch.Tensor]] = []  # pieces, and whether each has other bytes
        self.differences: list[str] = []  # of the newest sync, on an engine rank

    def _traffic_of(self, engine: int) -> dict[int, _Traffic]:
        """Return for each weight the step in which an engine rank receives it."""
        first = self._plan.round_of_step(engine, 0)
        if first not in self._steps:
            rounds = [self._plan.rounds[self._plan.round_of_step(engine, step)] for step in range(len(self._traffic))]
            steps = zip(rounds, self._traffic, strict=True)
            self._steps[first] = {number: traffic for part, traffic in steps for number in part.weights}
        return self._steps[first]

    def _find_targets(self, read: Reads) -> None:
        pieces: dict[int, list[Piece]] = defaultdict(list)
        for traffic in self._traffic:
            for piece in [*traffic.own, *(piece for of_rank in traffic.received.values() for piece in of_rank)]:
                pieces[piece.tensor].append(piece)
        for number, targets in enumerate(read.targets):
            if targets is None:
                continue
            self._direct.add(number)
            for piece in pieces[number]:
                self._targets[id(piece)] = _places(piece, targets)

    def _layouts_of(self, traffic: _Traffic) -> _Layouts:
        direct = all(piece.tensor in self._direct for of_rank in traffic.received.values() for piece in of_rank)
        return _Layouts(_joined(self._layout(traffic.sent)), self._layout(traffic.received, passing=direct))

    def send(self, local: Mapping[str, torch.Tensor]) -> None:
        """Send the pieces of this trainer rank's shards ``local``.

        All shards of a round that the rank may send are read, in the order of the table: merging adapters can be
        collective.
        """
        for _ in self.run(local):
            pass

    def run(self, local: Mapping[str, torch.Tensor] | None = None) -> Weights:
        """Send the pieces of the shards ``local``, if there are any, and yield the tensors for the engine's loaders.

        The rank must iterate to the end; then the engine's parameters have what goes straight into them, and
        `differences` has the name of each tensor whose bytes differ from the trainer's. Of the tensors only the needed
        parts are filled; one without any has no memory of its own. They may be views of the shards.
        """
        self._checks, self.differences = [], []
        ahead: _Exchange | None = None
        spaces = cycle([[_Space(self._links.device) for _ in layouts] for layouts in self._layouts[:2]])
        for traffic, layouts, own in zip(self._traffic, self._layouts, spaces, strict=False):
            exchange = self._begin(traffic, layouts, local, own)
            if ahead is not None:  # a round is under way while the one before it is taken
                yield from self._take(ahead)
            ahead = exchange
        if ahead is not None:
            yield from self._take(ahead)
        spoilt: list[Piece] = []
        if self._checks:
            checked, found = zip(*self._checks, strict=True)
            spoilt = list(compress(chain(*checked), torch.cat(found).tolist()))  # waits for the GPU once
        self.differences = list(dict.fromkeys(self._plan.tensors[piece.tensor].name for piece in spoilt))

    def _begin(
        self, traffic: _Traffic, layouts: _Layouts, local: Mapping[str, torch.Tensor] | None, spaces: list[_Space]
    ) -> _Exchange:
        """Begin to send the pieces of a round."""
        progress.advance()
        sources = self._sources(traffic, local) if local is not None else {}
        own = [(piece, self._in_dtype(piece, _part(piece, sources[piece.weight]))) for piece in traffic.own]
        sent, received = (space.packed(layout) for space, layout in zip(spaces, layouts, strict=True))
        if sent.pieces:
            torch._foreach_copy_(sent.parts, [_part(piece, sources[piece.weight]) for piece in sent.pieces])
            sums = checksums(sent.whole, sent.layout.rows) + traffic.mark
            torch._foreach_copy_(sent.sums, list(sums.split(list(map(len, sent.sums)))))
        work = None
        if traffic.busy:
            ranks = range(self._links.host.size())
            into, out = ([of.nbytes.get(rank, 0) for rank in ranks] for of in (layouts.received, layouts.sent))
            # The method of the group: that of all roles is not registered, as torch's function expects.
            work = self._links.weights.alltoall_base(received.whole, sent.whole, into, out)
        return _Exchange(traffic, own, sent, received, work)

    def _take(self, exchange: _Exchange) -> Weights:
        """Wait for the pieces of a round; put them into parameters, or yield the tensors that they complete."""
        traffic, own, received = exchange.traffic, exchange.own, exchange.received
        if exchange.work is not None:
            exchange.work.wait()
        direct = [(piece, to, part) for piece, part in own for to in self._targets.get(id(piece), ())]
        if direct:
            pieces, targets, parts = map(list, zip(*direct, strict=True))
            torch._foreach_copy_(targets, parts)
            self._compare(pieces, targets, parts)
        for which, targets in received.layout.placed:
            torch._foreach_copy_(targets, [received.parts[number] for number in which])
        if received.pieces:
            self._check(received, torch.cat(received.sums) - traffic.mark)
        staged: dict[int, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
        for piece, part in (*own, *zip(received.pieces, received.parts, strict=True)):
            if piece.tensor not in self._direct:
                staged[piece.tensor].append((piece, part))
        for number in traffic.tensors if self._receives else ():
            if number not in self._direct:
                name, dtype, shape = self._plan.tensors[number]
                yield name, _assembled(staged.get(number, []), shape, dtype, self._links.device)

    def _sources(self, traffic: _Traffic, local: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the shards that this rank may send, by number, with the axes of the Hugging Face tensors."""
        found = {}
        for number in traffic.owned:
            shard = plain(local[self._plan.weights[number].name])
            found[number] = shard.mT if self._plan.weights[number].transposed else shard
        return found

    def _in_dtype(self, piece: Piece, part: torch.Tensor) -> torch.Tensor:
        return part.to(self._plan.tensors[piece.tensor].dtype)

    def _layout(self, by_rank: Mapping[int, list[Piece]], passing: bool = True) -> _Layout:
        """Return the layout of pieces, by the rank that sends or receives them."""
        pieces, rows, nbytes = [], [], {}
        places: list[_Place] = []
        sums: list[_Place] = []
        begin = 0
        for rank, of_rank in sorted(by_rank.items()):
            first = begin
            for piece in of_rank:
                dtype = self._plan.tensors[piece.tensor].dtype
                strides = torch.empty(piece.shape, device="meta").stride()
                places.append((dtype, piece.shape, strides, begin // dtype.itemsize))
                end = begin + -(-piece.nbytes // ROW_BYTES) * ROW_BYTES
                rows.append((begin // ROW_BYTES, end // ROW_BYTES))
                begin = end
            pieces += of_rank
            sums.append((torch.int64, (len(of_rank), 2), (2, 1), begin // 8))
            begin += -(-CHECKSUM_BYTES * len(of_rank) // ROW_BYTES) * ROW_BYTES
            nbytes[rank] = begin - first
        ends = torch.tensor(rows, dtype=torch.int64).view(-1, 2).T.contiguous()
        targets = [self._targets.get(id(piece), ()) for piece in pieces]
        placed = []
        for place in range(max(map(len, targets), default=0)):
            which = [number for number, of_piece in enumerate(targets) if len(of_piece) > place]
            placed.append((which, [targets[number][place] for number in which]))
        return _Layout(pieces, places, ends.to(self._links.device), sums, nbytes, placed, passing)

    def _compare(self, pieces: list[Piece], targets: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
        """Note which of this rank's own pieces have other bits in the engine's parameters ``targets``."""
        self._checks.append((pieces, differing(targets, parts)))

    def _check(self, packed: _Packed, expected: torch.Tensor) -> None:
        """Note which pieces have other checksums than ``expected`` [pieces, 2] where the engine has them.

        What has gone into the engine's parameters is read back into the buffer.
        """
        for which, targets in packed.layout.placed or [([], [])]:
            if which:
                torch._foreach_copy_([packed.parts[number] for number in which], targets)
            found = checksums(packed.whole, packed.layout.rows)
            self._checks.append((packed.pieces, (found != expected).any(1)))


def _joined(sent: _Layout) -> _Layout:
    """Return the layout with pieces as one that follow each other in a shard and in the buffer, as gate and up do."""
    pieces: list[Piece] = []
    places: list[_Place] = []
    for piece, place in zip(sent.pieces, sent.places, strict=True):
        if pieces and (whole := _both(pieces[-1], piece)):
            dtype, shape, strides, first = places[-1]
            if place == (dtype, piece.shape, strides, first + math.prod(shape)):
                pieces[-1], places[-1] = whole, (dtype, whole.shape, strides, first)
                continue
        pieces.append(piece)
        places.append(place)
    return sent._replace(pieces=pieces, places=places)


def _both(one: Piece, other: Piece) -> Piece | None:
    """Return a piece of both if ``other`` has the rows of the shard after those of ``one``."""
    rows, more = one.spot[0], other.spot[0]
    if one.weight != other.weight or one.spot[1:] != other.spot[1:] or rows.stop != more.start:
        return None
    shape = (one.shape[0] + other.shape[0], *one.shape[1:])
    return one._replace(spot=(slice(rows.start, more.stop), *one.spot[1:]), shape=shape)


def checksums(whole: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return two checksums of each piece of a buffer, [pieces, 2], modulo 2^64: sums of its words of 8 bytes.

    ``rows`` [2, pieces]: the first row of each, and the one after its last. The word c of row r of a piece has the
    factor 2 r + 1 in the first sum, and 2 c + 1 in the second. An odd factor has an inverse modulo 2^64, so a change
    of one word changes both sums. The highest 31 bits of a word are first added to the lowest 31, bit by bit, because
    two changes of the highest bit alone, as of two signs, would cancel. Halves of a word, in place of 31 bits, would
    add signs to signs, and a change of both would be one of the highest bit again.
    """
    in_rows = whole.view(torch.int64).view(-1, ROW_BYTES // 8)
    if whole.is_cuda:
        from megatron_grpo.rollout.weight_sync import kernels  # Triton is there on GPUs alone

        return kernels.checksums(in_rows, rows)
    by_row, by_column = [], []
    for given in in_rows.split(ROWS):
        words = given >> 33
        words &= 2**31 - 1
        words ^= given
        by_row.append(words.sum(1))
        words *= _odd(words.shape[1], words.device)
        by_column.append(words.sum(1))
    of_rows = torch.cat(by_row)
    sums = torch.stack([of_rows, of_rows * _odd(len(of_rows), of_rows.device), torch.cat(by_column)])
    up_to = torch.nn.functional.pad(sums.cumsum(1), (1, 0))
    first, last = rows
    plain, by_rows, by_columns = up_to[:, last] - up_to[:, first]
    return torch.stack([by_rows - 2 * first * plain, by_columns], 1)


def differing(targets: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether each of ``targets`` has other bits than its part, [n]."""
    if targets[0].is_cuda:
        from megatron_grpo.rollout.weight_sync import kernels  # Triton is there on GPUs alone

        return kernels.differing(targets, parts)
    return torch.tensor([bool((_bits(to) != _bits(part)).any()) for to, part in zip(targets, parts, strict=True)])


def _part(piece: Piece, shard: torch.Tensor) -> torch.Tensor:
    """Return what a piece is of a shard; mostly all of it, and a view takes the host longer than the comparison."""
    return shard if piece.shape == shard.shape else shard[piece.spot]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


@lru_cache(maxsize=64)
def _odd(count: int, where: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * count, 2, device=where)


def _places(piece: Piece, targets: Mapping[Box, Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the piece's parts of the engine's parameters, from those of the boxes of its tensor."""
    place = [part if isinstance(part, slice) else slice(part, part + 1) for part in piece.place]
    for box, found in targets.items():
        if all(first <= part.start and part.stop <= end for part, (first, end) in zip(place, box, strict=True)):
            within = tuple(
                slice(part.start - first, part.stop - first, part.step)
                for part, (first, _) in zip(place, box, strict=True)
            )
            return [target[within].view(piece.shape) for target in found]
    raise AssertionError("a piece lies in a box of its tensor")


def _assembled(
    parts: Sequence[tuple[Piece, torch.Tensor]], shape: torch.Size, dtype: torch.dtype, where: torch.device | str
) -> torch.Tensor:
    """Return a Hugging Face tensor that has these parts; its other elements are undefined."""
    if not parts:
        return torch.empty((1,) * len(shape), dtype=dtype, device=where).expand(shape)
    if parts[0][0].shape == tuple(shape):
        return parts[0][1]
    whole = torch.empty(shape, dtype=dtype, device=where)
    torch._foreach_copy_([whole[piece.place] for piece, _ in parts], [part for _, part in parts])
    return whole


def holder(weights: Sequence[Weight], local: Mapping[str, torch.Tensor]) -> Holder:
    """Return what this trainer rank holds of ``weights``, with the shards ``local``."""
    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    of_experts = (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    held = np.array([weight.name in local for weight in weights])
    host = dist.get_rank() // int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return Holder(held, parallel_state.get_pipeline_model_parallel_rank(), ranks, of_experts, host)


def _of_all_ranks(
    group: dist.ProcessGroup,
    own: Holder | None,
    needs: Needs | None,
    weights: Sequence[Weight],
    tensors: Sequence[HfTensor],
) -> tuple[list[Holder], list[int], list[Needs], list[int]]:
    """Return what all trainers hold, their ranks, what all engine ranks need, and their ranks. Collective."""
    head, held = np.zeros((0, 6), np.int64), np.zeros((0, len(weights)), np.bool_)
    if own is not None:
        head, held = np.array([[own.stage, *own.tp, *own.expert_tp, own.host]]), own.held[None]
    (heads, helds), trainers = concatenated([head, np.packbits(held, axis=1)], group)
    held = np.unpackbits(helds, axis=1, count=len(weights)).astype(bool)
    holders = [
        Holder(mask, stage, (tp, tp_size), (expert, expert_size), host)
        for mask, (stage, tp, tp_size, expert, expert_size, host) in zip(held, heads.tolist(), strict=True)
    ]
    return holders, trainers.tolist(), *_needs_of_all(needs, tensors, group)


def _needs_of_all(
    own: Needs | None, tensors: Sequence[HfTensor], group: dist.ProcessGroup
) -> tuple[list[Needs], list[int]]:
    """Return the needs of all engine ranks, and their ranks; equal needs are one object. Collective.

    The replicas of an engine have equal needs, and a thousand ranks those of eight: the first rank with each of them
    sends them.
    """
    axes = max(len(tensor.shape) for tensor in tensors)
    digests, nothing = np.zeros((0, 4), np.int64), np.zeros((0, 1 + 2 * axes), np.int64)
    rows = nothing if own is None else transfer_plan.to_rows(own, axes)
    if own is not None:
        digests = np.frombuffer(hashlib.sha256(rows.tobytes()).digest(), np.int64)[None]
    (digests,), ranks = concatenated([digests], group)
    _, first, kind = np.unique(digests, axis=0, return_index=True, return_inverse=True)
    senders = ranks[first]
    (rows,), source = concatenated([rows if group.rank() in senders else nothing], group)
    needs = [transfer_plan.from_rows(rows[source == sender], tensors) for sender in senders]
    return [needs[number] for number in kind.reshape(-1)], ranks.tolist()
