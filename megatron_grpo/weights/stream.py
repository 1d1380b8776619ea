"""The whole model as full Hugging Face tensors, one after another, out of a model that is spread over ranks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_grpo.models.config import params_dtype
from megatron_grpo.utils.cpu_backend import device
from megatron_grpo.weights import mapping
from megatron_grpo.weights.parameter_mapping import Weight

# Weights that are gathered at once: one, or of experts one from each expert-parallel rank, in the order of the ranks.
Unit = Sequence[Weight]


def stream_hf(
    model_chunks: Sequence[nn.Module], args: Namespace, bucket_bytes: int = 256 * 2**20
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) for the whole model, on every rank in the same order. Collective.

    Every rank must iterate to the end. The order is that of `units`. The tensors are on the model's device; where a
    rank holds all of a weight they may be views of its parameters: what is to be kept is copied. Others travel in
    buckets of at most `bucket_bytes` (one unit, if that is larger), and a rank needs at most three times that: shards
    go from the owning pipeline stage to its peers of the same place in the stage, then every tensor-parallel group
    gathers (of experts: every expert- and tensor-parallel group), so that between stages nothing is sent twice. Tied
    embeddings come once, as the embedding; vocabulary padding does not come.
    Raises GrpoError when model and table disagree, before anything is sent.
    """
    weights = mapping.table(args)
    local = {weight.name: tensor for weight, tensor in mapping.local_weights(model_chunks, weights)}
    stages = mapping.owning_stages(weights, local)
    dense, experts = _dense_group(), _expert_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    # Tensors that hold all experts of a layer, with the experts that are there already.
    stacks: dict[str, tuple[Tensor, set[int]]] = {}

    def stacked(weight: Weight, tensors: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The weight's Hugging Face tensors; those that hold all experts, when the last of these has come."""
        for name, tensor in zip(weight.hf, tensors, strict=True):
            if not weight.all_experts:
                yield name, tensor
                continue
            stack = stacks.setdefault(name, (tensor.new_empty(weight.hf[name]), set()))
            stack[0][weight.expert] = tensor
            stack[1].add(weight.expert)
            if len(stack[1]) == weight.hf[name][0]:
                yield name, stacks.pop(name)[0]

    for stage, dtype, bucket in _buckets(units(weights), stages, params_dtype(args), bucket_bytes):
        group = dense if bucket[0][0].expert is None else experts
        if dist.get_world_size(pp_group) == len(group.members) == 1:
            for (weight,) in bucket:
                yield from stacked(weight, weight.split([local[weight.name].to(dtype)]))
            continue
        shapes = [unit[0].shard_shape(group.tp_size) for unit in bucket]
        sizes = [prod(shape) for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device())
        if dist.get_rank(pp_group) == stage:
            for unit, part in zip(bucket, flat.split(sizes), strict=True):
                part.copy_(local[unit[group.place].name].reshape(-1))
        if dist.get_world_size(pp_group) > 1:
            dist.broadcast(flat, src=dist.get_global_rank(pp_group, stage), group=pp_group)
        if len(group.members) > 1:
            gathered = torch.empty(len(group.members) * flat.numel(), dtype=dtype, device=device())
            dist.all_gather_into_tensor(gathered, flat, group=group.handle)
        else:
            gathered = flat
        by_member = [part.split(sizes) for part in gathered.chunk(len(group.members))]
        for number, (unit, shape) in enumerate(zip(bucket, shapes, strict=True)):
            for place, weight in enumerate(unit):
                ranks = [group.members.index((place, tp_rank)) for tp_rank in range(group.tp_size)]
                shards = [by_member[rank][number].view(shape) for rank in ranks]
                yield from stacked(weight, weight.split(shards))


class Described(NamedTuple):
    """A Hugging Face tensor, before it is there."""

    name: str
    dtype: torch.dtype
    shape: torch.Size


def describe(args: Namespace) -> list[Described]:
    """What `stream_hf` is going to yield, in its order."""
    found = []
    missing: dict[str, int] = {}  # tensors of all experts, with the number of experts still to come
    for unit in units(mapping.table(args)):
        for weight in unit:
            for name, shape in weight.hf.items():
                if weight.all_experts:
                    missing[name] = missing.get(name, shape[0]) - 1
                if not missing.get(name):
                    found.append(Described(name, weight.dtype or params_dtype(args), torch.Size(shape)))
    return found


def own_hf(model_chunks: Sequence[nn.Module], args: Namespace) -> Iterator[tuple[str, Tensor, int, int]]:
    """Yield (Hugging Face name, tensor, part, parts) of what this rank is to write of the whole model. Collective.

    `parts` is 1, or the number of experts in a tensor that holds them all, of which `part` is this one. Over all ranks
    every part of every tensor comes once: each pipeline stage and each expert-parallel rank keeps what it owns, and
    only tensor-parallel groups of the first data-parallel replica gather, each weight on one of their ranks in turn.
    """
    weights = mapping.table(args)
    local = {weight.name: tensor for weight, tensor in mapping.local_weights(model_chunks, weights)}
    stages = mapping.owning_stages(weights, local)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    expert_replica = parallel_state.get_expert_data_parallel_rank()
    for number, weight in enumerate(weights):
        if weight.name not in local or stages[weight.name] != stage:
            continue
        if (replica if weight.expert is None else expert_replica) > 0:
            continue
        shards = _gather(local[weight.name], weight, number)
        for name, tensor in zip(weight.hf, weight.split(shards), strict=True) if shards else ():
            yield name, tensor, *((weight.expert, weight.hf[name][0]) if weight.all_experts else (0, 1))


def _gather(tensor: Tensor, weight: Weight, number: int) -> list[Tensor]:
    """The shards of a weight on the rank of its tensor-parallel group whose turn it is; none on the others."""
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


def units(weights: Sequence[Weight]) -> Iterator[Unit]:
    """The table's weights as they travel, in its order, except that experts of equal place on their ranks go together.

    With 4 experts on 2 ranks, those of a row come as 0, 2, 1, 3.
    """
    ranks = parallel_state.get_expert_model_parallel_world_size()
    for row, run in groupby(weights, key=_row_of_experts):
        alike = list(run)
        if row is None:
            yield from ([weight] for weight in alike)
        else:
            share = len(alike) // ranks
            yield from (alike[place::share] for place in range(share))


def _row_of_experts(weight: Weight) -> str | None:
    """The same for all experts of one row and layer; None outside experts."""
    return None if weight.expert is None else weight.name.replace(f".{weight.expert}.linear", ".linear")


class _Group(NamedTuple):
    """The ranks that hold the shards of a unit: `members[r]` is (place in the unit, tensor-parallel rank) of rank r."""

    handle: dist.ProcessGroup
    members: list[tuple[int, int]]
    place: int
    tp_size: int


def _dense_group() -> _Group:
    group = parallel_state.get_tensor_model_parallel_group()
    size = dist.get_world_size(group)
    return _Group(group, [(0, rank) for rank in range(size)], 0, size)


def _expert_group() -> _Group:
    """Each member says where it stands, so that nothing depends on the order in which megatron-core numbers ranks."""
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
    """(owning stage, dtype, consecutive units of at most `limit` gathered bytes together, or a single one)."""

    def kind(unit: Unit) -> tuple[int, torch.dtype, bool]:
        return stages[unit[0].name], unit[0].dtype or params, unit[0].expert is not None

    for (stage, dtype, _), run in groupby(all_units, key=kind):
        bucket: list[Unit] = []
        total = 0
        for unit in run:
            tp_size = mapping.tensor_parallel(unit[0])[1]
            size = len(unit) * tp_size * prod(unit[0].shard_shape(tp_size)) * dtype.itemsize
            if bucket and total + size > limit:
                yield stage, dtype, bucket
                bucket, total = [], 0
            bucket.append(unit)
            total += size
        yield stage, dtype, bucket
