"""Assignment of completions to data-parallel ranks and micro-batches.

The lengths of completions differ by an order of magnitude, and an update is as slow as its slowest rank. `schedule`
distributes the completions so that every rank and every micro-batch has about the same amount of work. It is a pure
function of the lengths: each rank computes the whole schedule and takes its own row. The schedule changes the duration
of an update, never its result: see `megatron_grpo.algorithm.weighting`.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_grpo.utils.errors import GrpoError

Schedule = list[list[list[int]]]  # [rank][micro-batch] -> completion indices


def attention_coefficient(hidden_size: int, query_size: int, key_value_size: int, ffn_size: int) -> float:
    """Return c, the ratio of attention work to linear-layer work, in `schedule`'s work = length + c length^2.

    Training takes three times the flops of a forward pass, which per layer and sequence of length l are

    * linear layers: 2 parameters l, with parameters = hidden_size (2 query_size + 2 key_value_size + 3 ffn_size) for
      queries and output, keys and values, and the three matrices of a gated feed-forward;
    * attention: 2 query_size for the score of each pair of query and key and 2 query_size for its share of the
      output, over the l^2 / 2 pairs under the causal mask: 2 query_size l^2.

    The ratio of attention to linear layers is c l with c = query_size / parameters; at length 1 / c both are equal. The
    head is not counted, because it is computed only for the tokens of completions.

    Args:
        hidden_size: width of the residual stream.
        query_size: attention heads x head size.
        key_value_size: query groups x head size.
        ffn_size: inner width of the feed-forward layer; for experts, the sum over the active experts of a token.
    """
    return query_size / (hidden_size * (2 * query_size + 2 * key_value_size + 3 * ffn_size))


def schedule(
    lengths: npt.ArrayLike,
    dp_size: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    microbatch_multiple: int = 1,
    attention_coefficient: float = 0.0,
    together: npt.ArrayLike | None = None,
) -> Schedule:
    """Divide n completions over data-parallel ranks and micro-batches, balanced by work = length + c length^2.

    Each completion is assigned exactly once. Every rank gets the same number M of micro-batches, a multiple of
    `microbatch_multiple`, and no micro-batch is empty. The result is the same on every rank: ties are broken by index.
    Each rank computes its micro-batches in descending order of work, so that ranks stay synchronous.

    *Fixed* (`micro_batch_size` b): M = n / (dp_size b), each micro-batch with exactly b completions.

    *Budget* (`max_tokens`, replaces `micro_batch_size` when both are given): the smallest M for which the greedy
    packing below succeeds; no micro-batch has more than `max_tokens` tokens.

    Bounds, for P = M dp_size micro-batches of mean work `mean`, where "longest" and "shortest" denote the work of the
    longest and the shortest completion:

    * Fixed: micro-batches differ by at most longest - shortest.
    * Budget: a micro-batch exceeds another by more than the work of its own shortest completion only if this
      completion does not fit into the other. The heaviest micro-batch is below 2 mean + longest, so below 3 times the
      heaviest of the optimal division into P. While the lightest always has room, as at c = 0, micro-batches differ by
      at most longest, and the heaviest is at most 4/3 - 1/(3P) times the optimal one (Graham 1969).
    * Budget: M is at most 2 total tokens / (dp_size max_tokens), twice the minimum for that number of tokens, rounded
      up to a multiple of `microbatch_multiple`, if n is large enough. If n is a multiple of dp_size
      microbatch_multiple, a schedule always exists.
    * Budget with `together`: completions with equal values are divided into the fewest packs that first fit finds, and
      such pieces are then distributed as one completion each. If that takes more than 5/4 of the micro-batches of the
      smallest M that could do, or leaves one empty, single completions are distributed instead.
    * Both: the totals of the ranks differ by no more than the micro-batches do. Since no division has a maximum below
      the mean, maxima exceed the optimal ones by no more than these differences.

    Args:
        lengths: [n], tokens of each sequence, prompt included, at least 1. Under context parallelism the padded
            lengths, `zigzag.padded_lengths`: the budget then covers all but the pack's last sequence, the padding.
        dp_size: number of data-parallel ranks.
        micro_batch_size: completions in a micro-batch.
        max_tokens: maximum number of tokens in a micro-batch.
        microbatch_multiple: the pipeline size with virtual stages, because megatron-core's interleaved schedule needs
            whole groups of micro-batches; else 1.
        attention_coefficient: c >= 0, from the function of this name; 0 balances the numbers of tokens.
        together: [n], what a micro-batch computes once for all completions with the same value: the rows whose images
            the vision tower encodes.

    Returns:
        [rank][micro-batch] -> list of completion indices, ascending.

    Raises:
        GrpoError: a completion is longer than the budget, or n is too small for, or not divisible by, dp_size and
            microbatch_multiple.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    work = (sizes + attention_coefficient * sizes**2).tolist()
    if max_tokens is not None:
        groups = None if together is None else np.unique(together, return_inverse=True)[1].tolist()
        packs = _budget_packs(sizes.tolist(), work, dp_size, max_tokens, microbatch_multiple, groups)
    elif micro_batch_size is not None:
        packs = _fixed_packs(work, dp_size, micro_batch_size, microbatch_multiple)
    else:
        raise ValueError("schedule needs micro_batch_size or max_tokens")
    ranks = _round_robin([sum(work[i] for i in pack) for pack in packs], dp_size)
    return [[sorted(packs[pack]) for pack in rank] for rank in ranks]


def _fixed_packs(work: list[float], dp_size: int, micro_batch_size: int, multiple: int) -> list[list[int]]:
    n, unit = len(work), dp_size * micro_batch_size * multiple
    if n == 0 or n % unit:
        groups = f", in groups of {multiple} for the interleaved pipeline stages" if multiple > 1 else ""
        raise GrpoError(
            f"{n} completions cannot be divided into micro-batches of {micro_batch_size} on {dp_size} data-parallel "
            f"ranks{groups}: make their number (--global-batch-size) a multiple of {unit}, or use "
            f"--max-tokens-per-microbatch"
        )
    return _round_robin(work, n // micro_batch_size)


def _budget_packs(
    sizes: list[int], work: list[float], dp_size: int, max_tokens: int, multiple: int, groups: list[int] | None
) -> list[list[int]]:
    n, total, longest = len(sizes), sum(sizes), max(sizes, default=0)
    most = n // dp_size // multiple * multiple
    if most == 0:
        raise GrpoError(
            f"{n} completions are too few for {dp_size} data-parallel ranks with at least {multiple} micro-batches "
            f"each, none of them empty: raise --global-batch-size to at least {dp_size * multiple}"
        )
    if longest > max_tokens:
        raise GrpoError(
            f"completion {sizes.index(longest)} has {longest} tokens with its prompt, more than "
            f"--max-tokens-per-microbatch {max_tokens}: raise it to at least "
            f"--max-prompt-length + --max-completion-length"
        )
    at_least = max(
        -(-total // max_tokens), sum(2 * size > max_tokens for size in sizes)
    )  # two completions above max_tokens / 2 never share a pack
    fewest = -(-at_least // (dp_size * multiple)) * multiple
    if groups is not None:
        pieces = _first_fit(sizes, groups, max_tokens)
        piece_sizes = [sum(sizes[i] for i in piece) for piece in pieces]
        piece_work = [sum(work[i] for i in piece) for piece in pieces]
        for num_microbatches in range(fewest, min(fewest * 5 // 4, len(pieces) // dp_size) + 1, multiple):
            packs = _longest_first(piece_sizes, piece_work, dp_size * num_microbatches, max_tokens)
            if packs is not None and all(packs):
                return [[i for piece in pack for i in pieces[piece]] for pack in packs]
    for num_microbatches in range(fewest, most + 1, multiple):
        packs = _longest_first(sizes, work, dp_size * num_microbatches, max_tokens)
        if packs is not None:
            return packs
    raise GrpoError(
        f"{n} completions do not fit into {dp_size} x {most} micro-batches of {max_tokens} tokens, the largest number "
        f"of micro-batches without an empty one on {dp_size} data-parallel ranks in multiples of {multiple}: raise "
        f"--max-tokens-per-microbatch, or make --global-batch-size a multiple of {dp_size * multiple}"
    )


def _round_robin(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Deal items to bins, the same number to each, in rounds of the next `bins` largest items.

    In a round the largest item goes to the least loaded bin, the second largest to the second least loaded, and so on.
    The loads differ by at most the largest difference within one round, so by no more than max(costs) - min(costs).
    Proof: let the loads of two bins differ by D. The lighter bin gets the larger of two items that differ by s, at most
    the difference within the round. Afterwards the loads differ by |D - s| <= max(D, s).
    """
    order = _descending(costs)
    dealt: list[list[int]] = [[] for _ in range(bins)]
    loads = [0.0] * bins
    for first in range(0, len(order), bins):
        lightest_first = sorted(range(bins), key=lambda b: (loads[b], b))
        for b, item in zip(lightest_first, order[first : first + bins], strict=True):
            dealt[b].append(item)
            loads[b] += costs[item]
    return dealt


def _first_fit(sizes: list[int], groups: list[int], room: int) -> list[list[int]]:
    """Divide the items of each group into pieces of at most `room`: longest first, each into the first with room.

    At most one piece of a group is filled by half or less.
    """
    pieces: dict[int, list[list[int]]] = {}
    left: dict[int, list[int]] = {}
    for item in _descending(sizes):
        own, rooms = pieces.setdefault(groups[item], []), left.setdefault(groups[item], [])
        found = next((number for number, size in enumerate(rooms) if size >= sizes[item]), None)
        if found is None:
            own.append([item])
            rooms.append(room - sizes[item])
        else:
            own[found].append(item)
            rooms[found] -= sizes[item]
    return [piece for own in pieces.values() for piece in own]


def _longest_first(sizes: list[int], work: list[float], bins: int, room: int) -> list[list[int]] | None:
    """Put each item, longest first, into the bin with the least work that has room for the item's tokens.

    This is the LPT rule of Graham (SIAM J. Appl. Math. 17, 1969) under a capacity. Returns None if an item fits into no
    bin.

    *Every item finds room* if none exceeds `room` = B and bins >= 2 sum(sizes) / B: fewer than `bins` items are above
    B / 2. They come first, so each of them finds an empty bin. A smaller item would fail only if every bin held more
    than B / 2. Empty bins are lightest and have room: with at least `bins` items no bin stays empty.

    *The heaviest bin is below 2 mean + longest.* The items that it got while it was the lightest bin of all give it at
    most mean + longest. Let s be the tokens of its first item that was placed although a lighter bin existed, which was
    full. All bins then hold more than X = (B - s)(1 + c s): full bins have more than B - s tokens in items no shorter
    than s, and the other bins are no lighter than this bin, which is heavier than a full bin. So X < mean. From then
    on this bin, which holds an item no shorter than s, gets at most B - s tokens in items no longer than s: at most X.
    """
    packed: list[list[int]] = [[] for _ in range(bins)]
    roomy = [(0.0, b, room) for b in range(bins)]  # heap of (work, bin, room)
    full: list[tuple[int, float, int]] = []  # heap of (-room, work, bin): bins without room for an earlier, longer item
    for item in _descending(sizes):
        while full and -full[0][0] >= sizes[item]:
            minus_room, load, b = heapq.heappop(full)
            heapq.heappush(roomy, (load, b, -minus_room))
        while roomy and roomy[0][2] < sizes[item]:
            load, b, left = heapq.heappop(roomy)
            heapq.heappush(full, (-left, load, b))
        if not roomy:
            return None
        load, b, left = roomy[0]
        heapq.heapreplace(roomy, (load + work[item], b, left - sizes[item]))
        packed[b].append(item)
    return packed


def _descending(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda i: (-costs[i], i))
