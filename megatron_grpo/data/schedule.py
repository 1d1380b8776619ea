"""Which rank computes which completions, and in which micro-batches.

Completions differ in length by an order of magnitude, and an update is as slow as its slowest rank. `schedule` deals
them out so that every rank, and every micro-batch, has about the same number of tokens. It is a pure function of the
lengths, so each rank computes the whole schedule by itself and reads its own row. Which schedule is chosen changes
the time that an update takes, never its result: see `megatron_grpo.algorithm.weighting`.
"""

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from megatron_grpo.errors import GrpoError

Schedule = list[list[list[int]]]  # [rank][micro-batch] -> completion indices


def schedule(
    lengths: npt.ArrayLike,
    dp_size: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    min_microbatches: int = 1,
) -> Schedule:
    """Divide n completions over data-parallel ranks and micro-batches, balanced by tokens.

    Each completion comes exactly once, every rank gets the same number M of micro-batches, none is empty. The result is
    the same on every rank: ties are broken by index. Each rank's micro-batches come largest first, so that ranks are
    in step and memory runs out at once or never.

    *Fixed* (`micro_batch_size` b): M = n / (dp_size b), each micro-batch with exactly b completions.

    *Budget* (`max_tokens`, replaces `micro_batch_size` when both are given): the smallest M for which the greedy
    packing below keeps every micro-batch within `max_tokens`.

    What is promised, with P = M dp_size micro-batches, and "longest", "shortest" the longest and shortest completion:

    * Fixed: micro-batches differ by at most longest - shortest tokens, and so do the totals of the ranks.
    * Budget: micro-batches differ by at most longest tokens, and so do the totals of the ranks. The largest
      micro-batch is at most 4/3 - 1/(3P) times that of the best possible division into P micro-batches (Graham 1969).
      M is at most ceil(2 total / (dp_size max_tokens)), twice what the tokens alone need, or `min_microbatches` if
      that is more (n a multiple of dp_size).
    * Both: since no division has a maximum below the mean, the largest micro-batch, and the largest rank total, exceed
      the best possible one by no more than these differences.

    Args:
        lengths: [n], tokens of each sequence, prompt included.
        dp_size: number of data-parallel ranks.
        micro_batch_size: completions in a micro-batch.
        max_tokens: most tokens in a micro-batch (before any padding of the pack).
        min_microbatches: in budget mode, use at least so many micro-batches on each rank, or as many as n allows, so
            that a pipeline can be filled. In fixed mode M is what the arithmetic says.

    Returns:
        [rank][micro-batch] -> list of completion indices, ascending.

    Raises:
        GrpoError: a completion is longer than the budget; n does not divide, or is too small, for dp_size.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if max_tokens is not None:
        packs = _budget_packs(sizes, dp_size, max_tokens, min_microbatches)
    elif micro_batch_size is not None:
        packs = _fixed_packs(sizes, dp_size, micro_batch_size)
    else:
        raise ValueError("schedule needs micro_batch_size or max_tokens")
    ranks = _deal([_tokens(sizes, pack) for pack in packs], dp_size)
    return [[sorted(packs[pack]) for pack in rank] for rank in ranks]


def _fixed_packs(sizes: npt.NDArray[np.int64], dp_size: int, micro_batch_size: int) -> list[list[int]]:
    n = len(sizes)
    if n == 0 or n % (dp_size * micro_batch_size):
        raise GrpoError(
            f"{n} completions cannot be divided into micro-batches of {micro_batch_size} on {dp_size} data-parallel "
            f"ranks: make their number a multiple of {dp_size * micro_batch_size}, or use --max-tokens-per-microbatch"
        )
    return _deal(sizes.tolist(), n // micro_batch_size)


def _budget_packs(
    sizes: npt.NDArray[np.int64], dp_size: int, max_tokens: int, min_microbatches: int
) -> list[list[int]]:
    n, total = len(sizes), int(sizes.sum())
    if n < dp_size:
        raise GrpoError(f"{n} completions are too few for {dp_size} data-parallel ranks: each needs at least one")
    if sizes.max() > max_tokens:
        raise GrpoError(
            f"completion {int(sizes.argmax())} has {int(sizes.max())} tokens with its prompt, more than "
            f"--max-tokens-per-microbatch {max_tokens}: raise it to at least "
            f"--max-prompt-length + --max-completion-length"
        )
    most = n // dp_size
    fewest = min(most, max(1, min_microbatches, -(-total // (dp_size * max_tokens))))
    for num_microbatches in range(fewest, most + 1):
        packs = _longest_first(sizes.tolist(), dp_size * num_microbatches)
        if max(_tokens(sizes, pack) for pack in packs) <= max_tokens:
            return packs
    raise GrpoError(
        f"{n} completions do not fit into {dp_size * most} micro-batches of {max_tokens} tokens, the most that can be "
        f"shared evenly by {dp_size} data-parallel ranks: raise --max-tokens-per-microbatch, or make the number of "
        f"completions a multiple of {dp_size}"
    )


def _deal(costs: Sequence[int], bins: int) -> list[list[int]]:
    """Deal items to bins, equally many to each, in rounds: of the next `bins` largest items the largest goes to the
    least loaded bin, the second largest to the second least loaded, and so on.

    The loads differ by at most the largest difference within one round, so by no more than max(costs) - min(costs). For
    take two bins whose loads differ by D: the lighter one gets the larger of two items that differ by s <= the
    difference within the round, after which the loads differ by |D - s| <= max(D, s).
    """
    order = _descending(costs)
    dealt: list[list[int]] = [[] for _ in range(bins)]
    loads = [0] * bins
    for first in range(0, len(order), bins):
        lightest_first = sorted(range(bins), key=lambda b: (loads[b], b))
        for b, item in zip(lightest_first, order[first : first + bins], strict=True):
            dealt[b].append(item)
            loads[b] += costs[item]
    return dealt


def _longest_first(costs: Sequence[int], bins: int) -> list[list[int]]:
    """Put each item, largest first, into the least loaded bin: Graham's LPT rule (SIAM J. Appl. Math. 17, 1969).

    The loads differ by at most one item: the heaviest bin was the lightest when it got its last. When no item exceeds
    B and bins >= 2 sum(costs) / B, no load exceeds B: fewer than `bins` items are above B / 2, so each of them finds
    an empty bin, and a smaller one finds a bin loaded with at most the mean, which is at most B / 2. With at least
    `bins` items no bin stays empty.
    """
    packed: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, 0, b) for b in range(bins)]  # (load, number of items, bin); a heap as it stands
    for item in _descending(costs):
        load, count, b = heap[0]
        packed[b].append(item)
        heapq.heapreplace(heap, (load + costs[item], count + 1, b))
    return packed


def _descending(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda i: (-costs[i], i))


def _tokens(sizes: npt.NDArray[np.int64], indices: Iterable[int]) -> int:
    return int(sum(sizes[i] for i in indices))
