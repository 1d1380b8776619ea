"""Weights from the trainer ranks to the engine ranks: each engine rank receives the parts that it reads.

All ranks make the plan of the first sync of each kind together (`weights/transfer_plan.py`), from what the trainer
ranks hold and what the engine ranks need. Each round of it is one all-to-all exchange of bytes, in which trainers send
and engines receive. The engine's loaders then get full Hugging Face tensors, of which only the parts that they read
have been filled. So the kernels of the engine and its own processing of the weights need no code here.
"""

import hashlib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo.lora.table import adapter_table
from megatron_grpo.models.config import params_dtype
from megatron_grpo.models.fp8_weight import plain
from megatron_grpo.parallel.exchange import concatenated
from megatron_grpo.parallel.roles import Joint
from megatron_grpo.utils import progress
from megatron_grpo.utils.device import device
from megatron_grpo.weights import transfer_plan
from megatron_grpo.weights.parameter_mapping import Dimensions, Weight, same
from megatron_grpo.weights.stream import streamed, units
from megatron_grpo.weights.transfer_plan import HfTensor, Holder, Needs, Piece, Plan

Weights = Iterator[tuple[str, torch.Tensor]]
ALIGNMENT = 16  # bytes; a piece begins where its dtype can be read


def table(args: Namespace, what: str) -> list[Weight]:
    """Return the weights of a sync: all "weights", "trained weights" (`streamed`), or an "adapter" in full.

    Experts are in the order of `units`: the experts of a round then come from all expert-parallel ranks.
    """
    if what != "adapter":
        weights = streamed(args, only_trained=what == "trained weights")
        return [weight for unit in units(weights, args.expert_model_parallel_size) for weight in unit]
    dtype = getattr(torch, args.vllm_dtype) if args.vllm_dtype else params_dtype(args)
    return undivided(transfer_plan.hf_tensors(adapter_table(args), dtype))


def undivided(tensors: Sequence[HfTensor]) -> list[Weight]:
    """Return the weights of a model without shards that has these tensors."""
    return [Weight(name, {name: tuple(shape)}, same, None, Dimensions(), dtype=dtype) for name, dtype, shape in tensors]


class _Traffic(NamedTuple):
    """What this rank sends or receives in a round.

    ``pieces`` by the other's rank in the launch; ``owned``: the weights whose shards a trainer rank may send.
    """

    weights: range
    tensors: range
    owned: Sequence[int]
    pieces: dict[int, list[Piece]]

    def sizes(self, ranks: int) -> list[int]:
        """Return the bytes that are exchanged with each of the ranks of the launch."""
        found = [0] * ranks
        for other, pieces in self.pieces.items():
            found[other] = sum(map(_padded, pieces))
        return found


class Transfer:
    """The planned transfer of one kind of weights, on one rank of the launch. Collective over all of them."""

    def __init__(self, args: Namespace, joint: Joint, weights: Sequence[Weight], own: Holder | Needs):
        """Agree with all ranks on the plan: ``own`` is what a trainer rank holds, or an engine rank needs."""
        self._group = joint.weights
        params, size, trainers = params_dtype(args), joint.group.size(), joint.trainers
        tensors = transfer_plan.hf_tensors(weights, params)
        holders, needs = _of_all_ranks(joint, own, weights, tensors)
        self._plan = Plan(weights, params, holders, needs)
        is_trainer = joint.rank < trainers
        if is_trainer:
            exchanged = [
                (trainers + to, piece)
                for to in sorted(range(size - trainers), key=lambda to: id(self._plan.needs[to]))
                for _, piece in self._plan.pieces(to, joint.rank)
            ]
        else:
            exchanged = self._plan.pieces(joint.rank - trainers)
        owned = [self._plan.owned(joint.rank, part.weights) if is_trainer else () for part in self._plan.rounds]
        self._traffic = [_Traffic(*part, own, {}) for part, own in zip(self._plan.rounds, owned, strict=True)]
        round_of = {number: traffic for traffic in self._traffic for number in traffic.weights}
        for other, piece in exchanged:
            round_of[piece.weight].pieces.setdefault(other, []).append(piece)

    def send(self, local: Mapping[str, torch.Tensor]) -> None:
        """Send the pieces of this trainer rank's shards ``local``.

        All shards of a round that the rank may send are read, in the order of the table: merging adapters can be
        collective.
        """
        for traffic in self._traffic:
            shards = {n: local[self._plan.weights[n].name] for n in traffic.owned}
            buffer, views = self._buffer(traffic)
            sources = dict[int, torch.Tensor]()
            for number in {piece.weight for piece, _ in views}:
                shard = plain(shards[number])
                sources[number] = shard.mT if self._plan.weights[number].transposed else shard
            if views:
                torch._foreach_copy_([view for _, view in views], [sources[p.weight][p.spot] for p, _ in views])
            self._exchange(traffic, sent=buffer)

    def receive(self) -> Weights:
        """Yield the Hugging Face tensors on an engine rank, which must iterate to the end.

        Only the needed parts are filled; a tensor without any has no memory of its own.
        """
        for traffic in self._traffic:
            buffer, views = self._buffer(traffic)
            self._exchange(traffic, received=buffer)
            found: dict[int, list[tuple[Piece, torch.Tensor]]] = {}
            for piece, view in views:
                found.setdefault(piece.tensor, []).append((piece, view))
            for number in traffic.tensors:
                name, dtype, shape = self._plan.tensors[number]
                yield name, _assembled(found.get(number, []), shape, dtype, buffer.device)

    def _buffer(self, traffic: _Traffic) -> tuple[torch.Tensor, list[tuple[Piece, torch.Tensor]]]:
        """Return a buffer for the bytes of a round, in the order of the other ranks, and each piece's view of it."""
        pieces = [piece for _, of_rank in sorted(traffic.pieces.items()) for piece in of_rank]
        sizes = list(map(_padded, pieces))
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=_device_of(self._group))
        dtypes = (self._plan.tensors[piece.tensor].dtype for piece in pieces)
        views = [
            (piece, part[: piece.nbytes].view(dtype).view(piece.shape))
            for piece, part, dtype in zip(pieces, buffer.split(sizes) if sizes else (), dtypes, strict=True)
        ]
        return buffer, views

    def _exchange(
        self, traffic: _Traffic, *, sent: torch.Tensor | None = None, received: torch.Tensor | None = None
    ) -> None:
        ranks = self._group.size()
        sizes, zeros = traffic.sizes(ranks), [0] * ranks
        nothing = torch.empty(0, dtype=torch.uint8, device=_device_of(self._group))
        if sent is not None:
            self._group.alltoall_base(nothing, sent, zeros, sizes).wait()
        else:
            self._group.alltoall_base(received, nothing, sizes, zeros).wait()
        progress.advance()


def _assembled(
    parts: Sequence[tuple[Piece, torch.Tensor]], shape: torch.Size, dtype: torch.dtype, where: torch.device
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
    return Holder(held, parallel_state.get_pipeline_model_parallel_rank(), ranks, of_experts)


def _of_all_ranks(
    joint: Joint, own: Holder | Needs, weights: Sequence[Weight], tensors: Sequence[HfTensor]
) -> tuple[list[Holder], list[Needs]]:
    """Return what all trainer ranks hold, and what all engine ranks need. Collective."""
    axes = max(len(tensor.shape) for tensor in tensors)
    head, held = np.zeros((0, 5), np.int64), np.zeros((0, len(weights)), np.bool_)
    boxes = np.zeros((0, 1 + 2 * axes), np.int64)
    if isinstance(own, Holder):
        head, held = np.array([[own.stage, *own.tp, *own.expert_tp]]), own.held[None]
    else:
        boxes = transfer_plan.to_rows(own, axes)
    (heads, helds), _ = concatenated([head, np.packbits(held, axis=1)], joint.group)
    held = np.unpackbits(helds, axis=1, count=len(weights)).astype(bool)
    holders = [
        Holder(mask, stage, (tp, tp_size), (expert, expert_size))
        for mask, (stage, tp, tp_size, expert, expert_size) in zip(held, heads.tolist(), strict=True)
    ]
    return holders, _needs_of_all(None if isinstance(own, Holder) else boxes, boxes.shape[1], tensors, joint)


def _needs_of_all(
    own: npt.NDArray[np.int64] | None, columns: int, tensors: Sequence[HfTensor], joint: Joint
) -> list[Needs]:
    """Return the needs of all engine ranks from the rows of `to_rows` that each has; equal ones are one object.

    The replicas of an engine have equal needs, and a thousand ranks those of eight: the first rank with each of them
    sends them. Collective; trainers have None.
    """
    digests = np.zeros((0, 4), np.int64)
    if own is not None:
        digests = np.frombuffer(hashlib.sha256(own.tobytes()).digest(), np.int64)[None]
    (digests,), ranks = concatenated([digests], joint.group)
    _, first, kind = np.unique(digests, axis=0, return_index=True, return_inverse=True)
    senders = ranks[first]
    nothing = np.zeros((0, columns), np.int64)
    (rows,), source = concatenated([own if own is not None and joint.rank in senders else nothing], joint.group)
    needs = [transfer_plan.from_rows(rows[source == sender], tensors) for sender in senders]
    return [needs[number] for number in kind.reshape(-1)]


def _device_of(group: dist.ProcessGroup) -> torch.device | str:
    return "cpu" if isinstance(group, dist.ProcessGroupGloo) else device()


def _padded(piece: Piece) -> int:
    return -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
