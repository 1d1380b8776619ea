"""The whole model as full Hugging Face tensors, one after another, out of a model that is spread over ranks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_grpo.arguments import params_dtype
from megatron_grpo.cpu_backend import device
from megatron_grpo.weights import mapping
from megatron_grpo.weights.layout import Weight


def stream_hf(
    model_chunks: Sequence[nn.Module], args: Namespace, bucket_bytes: int = 256 * 2**20
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) for the whole model, on every rank in the same order. Collective.

    Every rank must iterate to the end. The tensors are on the model's device and never alias its parameters. Weights
    travel in buckets of at most `bucket_bytes` (one weight, if that is larger), and a rank needs at most three times
    that: shards go from the owning pipeline stage to its peers of the same tensor-parallel rank, then every
    tensor-parallel group gathers, so that between stages nothing is sent twice. Tied embeddings come once, as the
    embedding; vocabulary padding does not come. Raises GrpoError when model and table disagree, before anything is
    sent.
    """
    weights = mapping.table(args)
    local = mapping.local_weights(model_chunks, weights)
    owners = mapping.owning_stages(weights, local)
    tp_group, pp_group = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    tp_size, pp_size, stage = dist.get_world_size(tp_group), dist.get_world_size(pp_group), dist.get_rank(pp_group)
    dtype = params_dtype(args)

    for owner, bucket in _buckets(weights, owners, bucket_bytes // dtype.itemsize, tp_size):
        shapes = [weight.shard_shape(tp_size) for weight in bucket]
        sizes = [prod(shape) for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device())
        if stage == owner:
            for weight, part in zip(bucket, flat.split(sizes), strict=True):
                part.copy_(local[weight.name].detach().reshape(-1))
        if pp_size > 1:
            dist.broadcast(flat, src=dist.get_global_rank(pp_group, owner), group=pp_group)
        if tp_size > 1:
            gathered = torch.empty(tp_size * flat.numel(), dtype=dtype, device=device())
            dist.all_gather_into_tensor(gathered, flat, group=tp_group)
        else:
            gathered = flat
        by_rank = [part.split(sizes) for part in gathered.chunk(tp_size)]
        for number, (weight, shape) in enumerate(zip(bucket, shapes, strict=True)):
            shards = [parts[number].view(shape) for parts in by_rank]
            yield from zip(weight.hf, weight.split(shards), strict=True)


def _buckets(
    weights: Sequence[Weight], owners: Sequence[int], limit: int, tp_size: int
) -> Iterator[tuple[int, list[Weight]]]:
    """(owning stage, consecutive weights of at most `limit` gathered elements together, or a single one)."""
    for owner, run in groupby(zip(owners, weights, strict=True), key=lambda pair: pair[0]):
        bucket: list[Weight] = []
        total = 0
        for _, weight in run:
            size = tp_size * prod(weight.shard_shape(tp_size))
            if bucket and total + size > limit:
                yield owner, bucket
                bucket, total = [], 0
            bucket.append(weight)
            total += size
        yield owner, bucket
