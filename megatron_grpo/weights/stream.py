"""Iterate over the full Hugging Face tensors of a model that is sharded over ranks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_grpo.models.config import params_dtype
from megatron_grpo.models.fp8_weight import plain
from megatron_grpo.utils import progress
from megatron_grpo.utils.device import device
from megatron_grpo.vision.kinds import is_trained
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.parameter_mapping import Weight

# Weights that are gathered together: one, or one expert of each expert-parallel rank, in the order of the ranks.
Unit = Sequence[Weight]


class WeightStream(Iterator[tuple[str, Tensor]]):
    """Iterator over (Hugging Face name, full tensor) of ``weights``, as `stream_weights`, which shows its sources.

    ``local``: this rank's shards by the weights' names. ``only_trained``: frozen parts of a vision tower are left out.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        local: Mapping[str, Tensor],
        params: torch.dtype,
        bucket_bytes: int = 2**28,
        only_trained: bool = False,
    ):
        self.weights, self.local, self.only_trained = weights, local, only_trained
        self._stream = stream_weights(weights, local, params, bucket_bytes)

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._stream)


def stream_hf(
    model_chunks: Sequence[nn.Module], args: Namespace, bucket_bytes: int = 2**28, *, only_trained: bool = False
) -> WeightStream:
    """Return the stream of the weights of `streamed`: on every rank in the same order. Its iteration is collective.

    Every rank must iterate to the end. The order is that of `units`. The tensors are on the model's device. They may be
    views of the parameters where a rank holds a full weight: copy a tensor to keep it.

    Sharded weights are sent in buckets of at most `bucket_bytes` (a larger unit has a bucket of its own); a rank needs
    at most three times that memory. The owning pipeline stage broadcasts each shard to the ranks with the same position
    in the other stages; then each tensor-parallel group gathers the shards (for experts: each expert- and
    tensor-parallel group). So no shard is sent between stages twice. Tied embeddings are yielded once, as the
    embedding; vocabulary padding is removed.

    Raises GrpoError when the model differs from its family's table.
    """
    shards = local_shards(model_chunks, args)
    return stream_shards(args, shards, only_trained, bucket_bytes)


def stream_shards(
    args: Namespace, shards: Mapping[str, Tensor], only_trained: bool, bucket_bytes: int = 2**28
) -> WeightStream:
    """Return the stream of a model with these ``shards`` on this rank, as `stream_hf`."""
    only_trained &= bool(args.vision_config)
    return WeightStream(streamed(args, only_trained), shards, params_dtype(args), bucket_bytes, only_trained)


def streamed(args: Namespace, only_trained: bool) -> Sequence[Weight]:
    """Return the weights of the whole model, or ``only_trained``: without the frozen parts of a vision tower."""
    weights = model_weights.table(args)
    if not (only_trained and args.vision_config):
        return weights
    tower = "vision.tower."
    return [w for w in weights if not w.name.startswith(tower) or is_trained(args, w.name.removeprefix(tower))]


def local_shards(model_chunks: Sequence[nn.Module], args: Namespace) -> dict[str, Tensor]:
    """Return this rank's tensors by the names of the family's table; they share the model's memory."""
    local = model_weights.local_weights(model_chunks, model_weights.table(args))
    return {weight.name: tensor for weight, tensor in local}


def stream_weights(
    weights: Sequence[Weight], local: Mapping[str, Tensor], params: torch.dtype, bucket_bytes: int = 2**28
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) as `stream_hf`, of any ``weights``. Collective.

    ``local``: this rank's shards by the weights' names. ``params``: dtype of the weights without one of their own.
    """
    stages = model_weights.owning_stages(weights, local)
    dense, experts = _dense_group(), _expert_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    # Incomplete tensors of all experts of a layer, with the experts received so far.
    stacks: dict[str, tuple[Tensor, set[int]]] = {}

    def stacked(weight: Weight, tensors: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weight's Hugging Face tensors; a tensor of all experts is yielded with its last expert."""
        for name, tensor in zip(weight.hf, tensors, strict=True):
            if not weight.all_experts:
                yield name, tensor
                continue
            stack = stacks.setdefault(name, (tensor.new_empty(weight.hf[name]), set()))
            assert weight.expert is not None  # of a tensor of all experts
            stack[0][weight.expert] = tensor
            stack[1].add(weight.expert)
            if len(stack[1]) == weight.hf[name][0]:
                yield name, stacks.pop(name)[0]

    for stage, dtype, bucket in _buckets(units(weights, _expert_ranks()), stages, params, bucket_bytes):
        group = dense if bucket[0][0].expert is None else experts
        if dist.get_world_size(pp_group) == len(group.members) == 1:
            progress.advance()
            for (weight,) in bucket:
                yield from stacked(weight, weight.split([plain(local[weight.name]).to(dtype)]))
            continue
        shapes = [unit[0].shard_shape(group.tp_size) for unit in bucket]
        sizes = [prod(shape) for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device())
        if dist.get_rank(pp_group) == stage:
            _copy(flat.split(sizes), (plain(local[unit[group.place].name]).reshape(-1) for unit in bucket))
        if dist.get_world_size(pp_group) > 1:
            dist.broadcast(flat, src=dist.get_global_rank(pp_group, stage), group=pp_group)
        if len(group.members) > 1:
            gathered = torch.empty(len(group.members) * flat.numel(), dtype=dtype, device=device())
            dist.all_gather_into_tensor(gathered, flat, group=group.handle)
        else:
            gathered = flat
        by_member = [part.split(sizes) for part in gathered.chunk(len(group.members))]
        progress.advance()
        for number, (unit, shape) in enumerate(zip(bucket, shapes, strict=True)):
            for place, weight in enumerate(unit):
                ranks = [group.members.index((place, tp_rank)) for tp_rank in range(group.tp_size)]
                shards = [by_member[rank][number].view(shape) for rank in ranks]
                yield from stacked(weight, weight.split(shards))


def _copy(parts: Sequence[Tensor], sources: Iterator[Tensor], limit: int = 32 * 2**20) -> None:
    """Copy each source to its part, many together, because small kernels take less time than their launch.

    At most ``limit`` bytes and a source are held, for sources that are computed when they are read.
    """
    done, held, size = 0, [], 0
    for source in sources:
        held.append(source)
        size += source.nbytes
        if size > limit or done + len(held) == len(parts):
            torch._foreach_copy_(list(parts[done : done + len(held)]), held)
            done, held, size = done + len(held), [], 0


class Described(NamedTuple):
    """Description of a Hugging Face tensor that `stream_hf` will yield."""

    name: str
    dtype: torch.dtype
    shape: torch.Size


def describe(args: Namespace, only_trained: bool = False) -> list[Described]:
    """Return a description of every tensor that `stream_hf` yields, in the same order."""
    found = []
    missing: dict[str, int] = {}  # tensors of all experts -> number of experts not yet seen
    for unit in units(streamed(args, only_trained), _expert_ranks()):
        for weight in unit:
            for name, shape in weight.hf.items():
                if weight.all_experts:
                    missing[name] = missing.get(name, shape[0]) - 1
                if not missing.get(name):
                    found.append(Described(name, weight.dtype or params_dtype(args), torch.Size(shape)))
    return found


def owned_hf_tensors(
    model_chunks: Sequence[nn.Module], args: Namespace, shards: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor, int, int]]:
    """Yield (Hugging Face name, tensor, part, parts) for the tensors that this rank has to write. Collective.

    `parts` is 1, or the number of experts for a tensor that holds them all; `part` is then the expert's number. Over
    all ranks, each part of each tensor is yielded once. Pipeline stages and expert-parallel ranks yield the weights
    that they hold. Only the tensor-parallel groups of the first data-parallel replica gather shards; the ranks of such
    a group take turns. ``shards``: this rank's tensors by the weights' names, instead of the model's.
    """
    weights = model_weights.table(args)
    local: Mapping[str, Tensor] = shards or local_shards(model_chunks, args)
    stages = model_weights.owning_stages(weights, local)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    expert_replica = parallel_state.get_expert_data_parallel_rank()
    for number, weight in enumerate(weights):
        if weight.name not in local or stages[weight.name] != stage:
            continue
        if (replica if weight.expert is None else expert_replica) > 0:
            continue
        whole = _gather(plain(local[weight.name]), weight, number)
        part = weight.expert if weight.all_experts and weight.expert is not None else None
        for name, tensor in zip(weight.hf, weight.split(whole), strict=True) if whole else ():
            yield (name, tensor, 0, 1) if part is None else (name, tensor, part, weight.hf[name][0])


def _gather(tensor: Tensor, weight: Weight, number: int) -> list[Tensor]:
    """Gather a weight's shards on rank `number` mod size of its tensor-parallel group; return [] on the others."""
    if weight.expert is None:
        group = parallel_state.get_tensor_model_parallel_group()
    else:
        group = parallel_state.get_expert_tensor_parallel_group()
    place, size = dist.get_rank(group), dist.get_world_size(group)
    writer = number % size
    if weight.axis is None or size == 1:
        return [tensor] if place == writer else []
    shards = [torch.empty_like(tensor) for _ in range(size)] if place == writer else []
    dist.gather(tensor.contiguous(), shards or None, dst=dist.get_global_rank(group, writer), group=group)
    return shards


def units(weights: Sequence[Weight], ranks: int) -> Iterator[Unit]:
    """Group the table's weights for the transfer, in the table's order, except for experts.

    A unit of experts has one expert of each of so many expert-parallel ``ranks``: with 4 experts on 2 ranks, the units
    are (0, 2) and (1, 3).
    """
    for key, run in groupby(weights, key=_expert_group_key):
        alike = list(run)
        if key is None:
            yield from ([weight] for weight in alike)
        else:
            share = len(alike) // ranks
            yield from (alike[place::share] for place in range(share))


def _expert_ranks() -> int:
    return parallel_state.get_expert_model_parallel_world_size()


def _expert_group_key(weight: Weight) -> str | None:
    """Return a key that is equal for the same parameter of all experts of a layer; None outside experts."""
    return None if weight.expert is None else weight.name.replace(f".{weight.expert}.linear", ".linear")


class _Group(NamedTuple):
    """The ranks that hold the shards of a unit; `members[r]`: (index in the unit, tensor-parallel rank) of rank r."""

    handle: dist.ProcessGroup
    members: list[tuple[int, int]]
    place: int
    tp_size: int


def _dense_group() -> _Group:
    group = parallel_state.get_tensor_model_parallel_group()
    size = dist.get_world_size(group)
    return _Group(group, [(0, rank) for rank in range(size)], 0, size)


def _expert_group() -> _Group:
    """Build the group of experts; coordinates are all-gathered, so megatron-core's order of ranks does not matter."""
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    place, tp_rank = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
    mine = torch.tensor([place, tp_rank], device=device())
    everyone = mine.new_empty(2 * dist.get_world_size(group))
    dist.all_gather_into_tensor(everyone, mine, group=group)
    members = [(a, b) for a, b in everyone.view(-1, 2).tolist()]
    return _Group(group, members, place, parallel_state.get_expert_tensor_parallel_world_size())


def _buckets(
    all_units: Iterator[Unit], stages: dict[str, int], params: torch.dtype, limit: int
) -> Iterator[tuple[int, torch.dtype, list[Unit]]]:
    """Yield (owning stage, dtype, consecutive units); a bucket has at most `limit` gathered bytes, or a single unit."""

    def kind(unit: Unit) -> tuple[int, torch.dtype, bool]:
        return stages[unit[0].name], unit[0].dtype or params, unit[0].expert is not None

    for (stage, dtype, _), run in groupby(all_units, key=kind):
        bucket: list[Unit] = []
        total = 0
        for unit in run:
            tp_size = model_weights.tensor_parallel(unit[0])[1]
            size = len(unit) * tp_size * prod(unit[0].shard_shape(tp_size)) * dtype.itemsize
            if bucket and total + size > limit:
                yield stage, dtype, bucket
                bucket, total = [], 0
            bucket.append(unit)
            total += size
        yield stage, dtype, bucket
