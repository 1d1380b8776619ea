"""The rollout on the ranks that compute it: numbers of all completions on every rank, tokens where they are needed.

After a rollout each engine replica has some completions. `of_all_ranks` makes one batch of them: the arrays [n] of all
completions, in their global order, on every rank; `with_tokens_of` moves the tokens to the ranks that compute with
them. Values that a rank has computed reach the other ranks with the same completions by `spread` (of tokens), and all
ranks by `of_completions` (one value of each completion). The memory of a rank grows with its share of the tokens, plus
about 400 bytes for each completion of the rollout.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_grpo.data.batch import FIELDS, Array, Bool, Int64, RolloutBatch, of_one_width, offsets
from megatron_grpo.parallel.exchange import concatenated, exchange_tokens, from_holders, of_every_rank
from megatron_grpo.parallel.initialize import host_group


def of_all_ranks(own: RolloutBatch, group: dist.ProcessGroup | None = None) -> RolloutBatch:
    """Return all completions of all ranks in the order of their sample ids, with the tokens of ``own``. Collective.

    ``own`` holds all its tokens. Every completion is in the batch of one rank; a batch can be empty. Raises ValueError
    when the batches of two ranks have different optional arrays.
    """
    group = group or host_group()
    if (np.diff(own.sample_ids) < 0).any():
        own = own.sorted_by_sample()
    own = _with_common_arrays(own, group)
    names = [name for name, spec in FIELDS.items() if spec.axis == "completion" and getattr(own, name) is not None]
    sizes = own.lengths, own.response_lengths
    (*values, lengths, response_lengths), rank = concatenated([*(getattr(own, name) for name in names), *sizes], group)
    arrays: dict[str, Any] = dict(zip(names, values, strict=True))
    order = np.argsort(arrays["sample_ids"], kind="stable")
    arrays = {name: array[order] for name, array in arrays.items()}
    mine = rank[order] == group.rank()
    arrays |= {"all_lengths": lengths[order], "all_response_lengths": response_lengths[order]}
    return replace(own, cu_seqlens=offsets(np.where(mine, lengths[order], 0)), **arrays)


def _with_common_arrays(own: RolloutBatch, group: dist.ProcessGroup) -> RolloutBatch:
    """Return the batch as wide as the widest one; if it is empty, with the optional arrays of the others, too."""
    arrays = own.arrays()
    shapes = [arrays[name].shape[1:] if name in arrays else (0,) * spec.columns for name, spec in FIELDS.items()]
    header = torch.tensor([*chain.from_iterable(shapes), *(name in arrays for name in FIELDS)])
    largest = torch.stack([header, -header] if own.num_completions else [torch.full_like(header, -(2**31))] * 2)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    present = largest[0] >= 0  # some rank has completions
    fields = (spec.fill for spec in FIELDS.values() for _ in range(spec.columns))
    any_width = torch.tensor([*(fill is not None for fill in fields), *[False] * len(FIELDS)])
    alike = present & ~any_width
    if not torch.equal(largest[0][alike], -largest[1][alike]):
        raise ValueError(f"batches of two ranks with different arrays; this rank has {sorted(arrays)}")
    if not present.all():
        return own
    numbers = iter(largest[0].tolist())
    shapes = [[next(numbers) for _ in range(spec.columns)] for spec in FIELDS.values()]
    if own.num_completions:
        widest = {n: np.empty((0, *s), FIELDS[n].dtype) for n, s in zip(FIELDS, shapes, strict=True) if n in arrays}
        given = [name for name in widest if FIELDS[name].fill is not None]
        return replace(own, **{name: of_one_width(name, [arrays[name], widest[name]])[0] for name in given})
    return RolloutBatch(
        **{
            name: np.zeros((int(spec.axis == "offset"), *shape), spec.dtype)
            for (name, spec), shape, given in zip(FIELDS.items(), shapes, numbers, strict=True)
            if given
        }
    )


def with_tokens_of(batch: RolloutBatch, needs: Bool, group: dist.ProcessGroup | None = None) -> RolloutBatch:
    """Return the batch with the tokens of the completions that ``needs`` [n] names instead of those held. Collective.

    Where every rank of the group needs all, the batch is whole on all ranks (`RolloutBatch.holds_all`).
    """
    group = group or host_group()
    names = [name for name, spec in FIELDS.items() if spec.axis == "token" and getattr(batch, name) is not None]
    arrays = [getattr(batch, name) for name in names]
    arrays, held = exchange_tokens(arrays, batch.cu_seqlens[:-1], batch.lengths, batch.held, needs, group)
    changed: dict[str, Any] = dict(zip(names, arrays, strict=True))
    if batch.image_bytes is not None and batch.image_sizes is not None:
        starts = offsets(batch.held_image_sizes)[:-1]
        (changed["image_bytes"],), _ = exchange_tokens(
            [batch.image_bytes], starts, batch.image_sizes, batch.held, needs, group
        )
    whole = of_every_rank(held, group).all()
    changed["all_lengths"] = None if whole else batch.lengths
    changed["all_response_lengths"] = None if whole else batch.response_lengths
    return replace(batch, cu_seqlens=offsets(np.where(held, batch.lengths, 0)), **changed)


def spread(batch: RolloutBatch, arrays: Sequence[Array], computed: Bool) -> list[Array]:
    """Return per-token arrays with what the ranks have computed, on all ranks that hold the tokens. Collective.

    ``arrays`` [total, ...] have the values of the completions that this rank has ``computed`` [n]. The values of
    completions that no rank has computed stay as they are.
    """
    starts, lengths = batch.cu_seqlens[:-1], batch.lengths
    values, received = exchange_tokens(arrays, starts, lengths, computed, batch.held, host_group())
    positions = batch.token_positions(np.flatnonzero(received))
    result = [array.copy() for array in arrays]
    for array, value in zip(result, values, strict=True):
        array[positions] = value
    return result


def of_completions(batch: RolloutBatch, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return values [..., n] of all completions; this rank has those of the completions that it holds. Collective.

    Without communication if every rank holds all.
    """
    return values.astype(np.float64) if batch.holds_all else from_holders(values, batch.held, host_group())


def mean_in_loss(batch: RolloutBatch, values: npt.NDArray[Any]) -> float:
    """Return the mean of ``values`` [total] over the tokens in the loss of all completions; 0 without any. Collective.

    The sums of single completions are added exactly, so that the mean does not depend on who holds what.
    """
    sampled = batch.response_mask == 1
    sums = np.bincount(batch.completion_of_tokens[sampled], values[sampled], batch.num_completions)
    return math.fsum(of_completions(batch, sums)) / max(int(batch.response_lengths.sum()), 1)


def first_holders(batch: RolloutBatch) -> Int64:
    """Return [n] the first rank that holds each completion, for work that is to be done once. Collective.

    Without communication if every rank holds all.
    """
    if batch.holds_all:
        return np.zeros(batch.num_completions, np.int64)
    return of_every_rank(batch.held, host_group()).argmax(0)
