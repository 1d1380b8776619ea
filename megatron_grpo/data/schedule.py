"""Assignment of completions to data-parallel ranks and micro-batches.

The lengths of completions differ by an order of magnitude, and an update is as slow as its slowest rank. `schedule`
distributes the completions so that every rank and every micro-batch has about the same amount of work, and
`hybrid_schedule` also chooses how many context-parallel ranks share a micro-batch. Both are pure functions of the
lengths: each rank computes the whole schedule and takes its own row. The schedule changes the duration of an update,
never its result: see `megatron_grpo.algorithm.weighting`.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_grpo.data.prefix_tree import Prefixes, spared_tokens
from megatron_grpo.parallel.zigzag import padded_lengths
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
    prefixes: Prefixes | None = None,
    cp_size: int = 1,
) -> Schedule:
    """Divide n completions over data-parallel ranks and micro-batches, balanced by work = length + c length^2.

    Each completion is assigned exactly once. Every rank gets the same number M of micro-batches, a multiple of
    `microbatch_multiple`. The result is the same on every rank: ties are broken by index. Each rank computes its
    micro-batches in descending order of work, so that ranks stay synchronous.

    *Fixed* (`micro_batch_size` b): M = n / (dp_size b), each micro-batch with exactly b completions.

    *Budget* (`max_tokens`, replaces `micro_batch_size` when both are given): the smallest M for which the greedy
    packing below succeeds; no micro-batch has more than `max_tokens` tokens. None is empty if that is possible:
    three completions that fill a micro-batch each are four micro-batches on two ranks, one of them empty.

    Bounds, for P = M dp_size micro-batches of mean work `mean`, where "longest" and "shortest" denote the work of the
    longest and the shortest completion:

    * Fixed: micro-batches differ by at most longest - shortest.
    * Budget: a micro-batch exceeds another by more than the work of its own shortest completion only if this
      completion does not fit into the other. The heaviest micro-batch is below 2 mean + longest, so below 3 times the
      heaviest of the optimal division into P. While the lightest always has room, as at c = 0, micro-batches differ by
      at most longest, and the heaviest is at most 4/3 - 1/(3P) times the optimal one (Graham 1969).
    * Budget: M is at most 2 total tokens / (dp_size max_tokens), twice the minimum for that number of tokens, rounded
      up to a multiple of `microbatch_multiple`. If n is a multiple of dp_size microbatch_multiple, no micro-batch is
      empty.
    * Budget with `together`: completions with equal values are divided into the fewest packs that first fit finds, and
      such pieces are then distributed as one completion each. If that takes more than 5/4 of the micro-batches that
      single completions take, or leaves one empty, single completions are distributed instead. `prefixes` have
      another rule.
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
        prefixes: the tokens that completions have in common, and that a micro-batch computes once (`spared_tokens` of
            them, with ``cp_size``); replaces `together`. Of the divisions into pieces of the trees with up to all
            their completions, halves, quarters and so on, and single completions, that with the least work on the
            slowest rank is taken.

    Returns:
        [rank][micro-batch] -> list of completion indices, ascending.

    Raises:
        GrpoError: a completion is longer than the budget, n is 0, or without a budget n is not divisible by dp_size,
            micro_batch_size and microbatch_multiple.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    work = (sizes + attention_coefficient * sizes**2).tolist()
    if max_tokens is not None:
        trees = None if prefixes is None else _Trees(prefixes, attention_coefficient, {1: cp_size})
        completions = _Completions({1: sizes.tolist()}, work, _numbered(together), trees)
        return _budget_schedule(completions, dp_size, max_tokens, microbatch_multiple)[1]
    if micro_batch_size is None:
        raise ValueError("schedule needs micro_batch_size or max_tokens")
    packs = _fixed_packs(work, dp_size, micro_batch_size, microbatch_multiple)
    ranks = _round_robin([sum(work[i] for i in pack) for pack in packs], dp_size)
    return [[sorted(packs[pack]) for pack in rank] for rank in ranks]


def degrees_of(cp_size: int) -> list[int]:
    """Return the numbers of context-parallel ranks that can hold a micro-batch of `hybrid_schedule`, ascending."""
    return [2**power for power in range(cp_size.bit_length())]


def hybrid_schedule(
    lengths: npt.ArrayLike,
    dp_size: int,
    cp_size: int,
    max_tokens: int,
    microbatch_multiple: int = 1,
    attention_coefficient: float = 0.0,
    together: npt.ArrayLike | None = None,
    samples: npt.NDArray[np.int32] | None = None,
    prefixes: Prefixes | None = None,
    repeated: Mapping[int, npt.NDArray[np.int64]] | None = None,
) -> tuple[list[int], Schedule]:
    """Divide n completions over data- and context-parallel ranks, and choose the degree of each micro-batch.

    In a micro-batch of degree c, a power of two, c neighbouring context-parallel ranks hold a pack together, each of
    them 1 / c of its tokens. The cp_size ranks of a group thus compute cp_size / c packs at the same time. Micro-batch
    i has the same degree on all ranks. The work of a rank is that of its packs, divided by their degrees. Micro-batches
    are in descending order of degree, then of work.

    A completion needs the smallest degree c for which its padded length is at most c max_tokens. Of every degree above
    1 there are as many micro-batches as the completions that need it fill with one in each pack (two of them share no
    pack of this degree, because each is longer than half of it). There are as many of degree 1 as make the greedy
    packing of `schedule` succeed; it may put a completion into a pack of a larger degree than it needs. If there are
    too few completions for one in each pack, the smallest degree is 2 instead, then 4, up to cp_size. If they are too
    few for that, too, some packs are empty.

    With lengths of at most max_tokens the result is that of `schedule` for dp_size cp_size ranks, if n is large enough.

    Args:
        lengths: [n], tokens of each sequence, prompt included, at least 1, not padded.
        dp_size, cp_size: data-parallel ranks, and context-parallel ranks of each, a power of two.
        max_tokens: maximum number of tokens of a rank in a micro-batch: a pack of degree c has up to c max_tokens, with
            the padding of its sequences.
        microbatch_multiple, attention_coefficient, together: as in `schedule`.
        samples: [n], sequences that each completion has, which are padded one by one; None: 1.
        prefixes: as in `schedule`; pieces of the trees have room in packs of each degree.
        repeated: by degree, [n], tokens of each completion that its samples have in common, and that a pack has once.

    Returns:
        ([micro-batch] -> degree, [data-parallel rank x cp_size + context-parallel rank][micro-batch] -> completions).
        The c ranks that share a pack have equal lists.

    Raises:
        GrpoError: a completion is longer than cp_size max_tokens, or n is 0.
    """
    length = np.asarray(lengths, dtype=np.int64)
    work = (length + attention_coefficient * length**2).tolist()
    degrees = degrees_of(cp_size)
    sizes = {degree: padded_lengths(length, degree, samples) for degree in degrees}
    if repeated is not None:
        sizes = {degree: size - repeated[degree] for degree, size in sizes.items()}
    trees = None if prefixes is None else _Trees(prefixes, attention_coefficient, {d: d for d in degrees})
    of_degrees = {degree: size.tolist() for degree, size in sizes.items()}
    completions = _Completions(of_degrees, work, _numbered(together), trees)
    return _budget_schedule(completions, dp_size * cp_size, max_tokens, microbatch_multiple)


def _numbered(together: npt.ArrayLike | None) -> list[int] | None:
    return None if together is None else np.unique(together, return_inverse=True)[1].tolist()


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


Packs = list[tuple[int, list[int]]]  # (degree, completions)
_Piece = tuple[int, list[int]]  # (tokens, completions)


class _Trees:
    """The tokens that completions have in common, and that a micro-batch has once.

    ``cp_sizes``: the context-parallel ranks that hold a micro-batch of each degree.
    """

    def __init__(self, prefixes: Prefixes, attention_coefficient: float, cp_sizes: Mapping[int, int]):
        self.order = prefixes.order.tolist()
        # By degree: with the one before, in this order.
        shared = {degree: spared_tokens(prefixes.common, cp_size) for degree, cp_size in cp_sizes.items()}
        self.shared: dict[int, list[int]] = {degree: tokens.tolist() for degree, tokens in shared.items()}
        self.place = {completion: place for place, completion in enumerate(self.order)}
        self._attention_coefficient = attention_coefficient
        self._smallest = {degree: _running_minima(tokens) for degree, tokens in shared.items()}

    def spared(self, pack: list[int], degree: int) -> list[int]:
        """Return the tokens that each completion of a pack but the first shares with one before it."""
        places = sorted(map(self.place.__getitem__, pack))
        return [self._between(a, b, degree) for a, b in itertools.pairwise(places)]

    def _between(self, first: int, last: int, degree: int) -> int:
        """Return the tokens that the completions at two places have in common."""
        power = (last - first).bit_length() - 1
        of_power = self._smallest[degree][power]
        return min(of_power[first + 1], of_power[last + 1 - 2**power])

    def work_of(self, spared: list[int]) -> float:
        """Return the work of ``spared`` tokens."""
        return sum(tokens + self._attention_coefficient * tokens**2 for tokens in spared)


def _running_minima(values: npt.NDArray[np.int64]) -> list[list[int]]:
    """Return the minima of 1, 2, 4, ... of the values from each place on."""
    found = [values]
    while len(found[-1]) > (half := 2 ** (len(found) - 1)):
        found.append(np.minimum(found[-1][:-half], found[-1][half:]))
    return [minima.tolist() for minima in found]


@dataclass(frozen=True)
class _Completions:
    """n completions, [n] each: padded lengths by degree (ascending), work, and groups that micro-batches keep together.

    With ``trees`` a micro-batch has common tokens, and their work, once.
    """

    sizes: Mapping[int, list[int]]
    work: list[float]
    groups: list[int] | None = None
    trees: _Trees | None = None

    def size_of(self, pack: list[int], degree: int) -> int:
        """Return the tokens of a pack."""
        return sum(self.sizes[degree][i] for i in pack) - sum(self.trees.spared(pack, degree) if self.trees else ())

    def work_of(self, pack: list[int]) -> float:
        """Return the work of a pack."""
        work = sum(self.work[i] for i in pack)
        return work if self.trees is None else work - self.trees.work_of(self.trees.spared(pack, 1))


def _budget_schedule(
    completions: _Completions, ranks: int, max_tokens: int, multiple: int
) -> tuple[list[int], Schedule]:
    """Return the degree of each micro-batch, and the schedule of the division with the least work on a rank."""
    dealt = []
    for packs in _divisions(completions, ranks, max_tokens, multiple):
        degrees = [degree for degree, _ in packs]
        costs = [completions.work_of(pack) / degree for degree, pack in packs]
        of_ranks = _round_robin(costs, ranks, degrees)
        slowest = max(sum(costs[number] for number in rank) for rank in of_ranks)
        dealt.append((slowest, packs, of_ranks))
    _, packs, of_ranks = min(dealt, key=lambda division: division[0])
    schedule_ = [[sorted(packs[number][1]) for number in rank] for rank in of_ranks]
    return [packs[number][0] for number in of_ranks[0]], schedule_


def _divisions(completions: _Completions, ranks: int, max_tokens: int, multiple: int) -> list[Packs]:
    """Return the packs of all ranks, for each way of dividing groups into pieces that is worth comparing."""
    sizes, work, groups = completions.sizes, completions.work, completions.groups
    n, widest = len(work), max(sizes)
    limit = widest * max_tokens
    if not n:
        raise GrpoError("there are no completions to divide into micro-batches: raise --global-batch-size")
    budget = f"--max-tokens-per-microbatch {max_tokens}" + f" x --context-parallel-size {widest}" * (widest > 1)
    if (longest := max(sizes[widest])) > limit:
        raise GrpoError(
            f"completion {sizes[widest].index(longest)} has {longest} tokens with its prompt, more than {budget}: "
            "raise it to at least --max-prompt-length + --max-completion-length"
        )
    # Equal numbers of micro-batches on all ranks can be more than the completions, or than those that share none.
    found = _fewest(sizes, work, ranks, max_tokens, multiple) or _fewest(
        sizes, work, ranks, max_tokens, multiple, some_empty=True
    )
    assert found is not None
    if completions.trees is None:
        if groups is None:
            return [found]
        few = sum(degree for degree, _ in found) // ranks * 5 // 4
        return [_packs_of_pieces(completions, max(Counter(groups).values()), ranks, max_tokens, multiple, few) or found]
    divisions, tried = [found], 1
    for degree in sizes:
        most_members = members = max(map(len, _parts_of_trees(completions, max_tokens, n, degree)))
        while members > tried:  # large pieces share more, small ones divide evenly
            divisions.append(
                _packs_of_pieces(completions, members, ranks, max_tokens, multiple, degree=degree) or found
            )
            members //= 2
        tried = max(tried, most_members)  # fewer fit into packs of a smaller degree
    return divisions


def _packs_of_pieces(
    completions: _Completions,
    members: int,
    ranks: int,
    max_tokens: int,
    multiple: int,
    most: int | None = None,
    degree: int = 1,
) -> Packs | None:
    """Return packs of pieces of the groups or trees, each of at most ``members`` completions; None as in `_fewest`.

    A piece of a tree has room in a pack of ``degree``.
    """
    if completions.trees is None:
        pieces = _first_fit(completions, max_tokens, members)
    else:
        pieces = _parts_of_trees(completions, max_tokens, members, degree)
    sizes = {degree: [completions.size_of(piece, degree) for piece in pieces] for degree in completions.sizes}
    packs = _fewest(sizes, list(map(completions.work_of, pieces)), ranks, max_tokens, multiple, most)
    return packs and [(degree, [i for piece in pack for i in pieces[piece]]) for degree, pack in packs]


def _fewest(
    sizes: Mapping[int, list[int]],
    work: list[float],
    ranks: int,
    max_tokens: int,
    multiple: int,
    most: int | None = None,
    some_empty: bool = False,
) -> Packs | None:
    """Return packs for the smallest number of micro-batches that the greedy packing finds; None if there is none.

    ``most`` is the largest number to try; without it, the largest without an empty pack. With ``some_empty`` packs can
    be empty, and packs are always found: with as many as items, each item has one.
    """
    needed = [next(c for c in sizes if sizes[c][i] <= c * max_tokens) for i in range(len(work))]
    for smallest in sizes:
        degrees = [c for c in sizes if c >= smallest]
        least = [max(c, smallest) for c in needed]
        numbers = {c: -(-least.count(c) * c // ranks) for c in degrees[1:]}  # of micro-batches
        wide = sum(numbers.values())
        tokens = -(-sum(sizes[smallest]) // max_tokens)
        if not wide:  # two items above half of a pack never share one
            tokens = max(tokens, smallest * sum(2 * size > smallest * max_tokens for size in sizes[smallest]))
        fewest = -(-max(-(-tokens // ranks), wide) // multiple) * multiple
        for number in itertools.count(fewest, multiple):
            numbers[smallest] = number - wide
            packs = [c for c in degrees for _ in range(numbers[c] * ranks // c)]
            if (len(packs) > len(work) and not some_empty) or (most is not None and number > most):
                break
            filled = _longest_first(sizes, work, least, packs, max_tokens)
            if filled is not None and (some_empty or all(filled)):
                return list(zip(packs, filled, strict=True))
    return None


def _round_robin(costs: Sequence[float], bins: int, degrees: Sequence[int] | None = None) -> list[list[int]]:
    """Deal items to bins, the same number to each, in rounds of the next `bins` largest items.

    In a round the largest item goes to the least loaded bin, the second largest to the second least loaded, and so on.
    The loads differ by at most the largest difference within one round, so by no more than max(costs) - min(costs).
    Proof: let the loads of two bins differ by D. The lighter bin gets the larger of two items that differ by s, at most
    the difference within the round. Afterwards the loads differ by |D - s| <= max(D, s).

    With ``degrees`` an item of degree c goes to c neighbouring bins, and costs each of them as much. A round has items
    of one degree, the largest degree first: neighbours have shared all items before, so their loads are equal.
    """
    degrees = degrees or [1] * len(costs)
    order = sorted(range(len(costs)), key=lambda i: (-degrees[i], -costs[i], i))
    dealt: list[list[int]] = [[] for _ in range(bins)]
    loads = [0.0] * bins
    while order:
        degree = degrees[order[0]]
        now, order = order[: bins // degree], order[bins // degree :]
        lightest_first = sorted(range(0, bins, degree), key=lambda b: (loads[b], b))
        for b, item in zip(lightest_first, now, strict=True):
            for neighbour in range(b, b + degree):
                dealt[neighbour].append(item)
                loads[neighbour] += costs[item]
    return dealt


def _first_fit(completions: _Completions, room: int, members: int) -> list[list[int]]:
    """Divide each group into pieces of at most ``room`` tokens and so many members, where nothing is padded for ranks.

    Longest first, each into the first piece with room. Without a limit of members, at most one piece of a group is
    filled by half or less. A longer completion is a piece of its own.
    """
    assert completions.groups is not None
    pieces: dict[int, list[list[int]]] = {}
    for item in _descending(completions.sizes[1]):
        own = pieces.setdefault(completions.groups[item], [])
        fits = (p for p in own if len(p) < members and completions.size_of([*p, item], 1) <= room)
        piece = next(fits, None)
        if piece is None:
            own.append([item])
        else:
            piece.append(item)
    return [piece for own in pieces.values() for piece in own]


def _parts_of_trees(completions: _Completions, max_tokens: int, members: int, degree: int) -> list[list[int]]:
    """Divide each tree into pieces for packs of ``degree``, with so many members at most; a long one is alone.

    From the leaves to the roots: the pieces of a node's branches join where they fit. They have its tokens in common.
    """
    trees = completions.trees
    assert trees is not None
    shared, room = trees.shared[degree], degree * max_tokens
    stack: list[tuple[int, list[_Piece]]] = [(0, [])]  # (depth of a node, its pieces)
    for place, item in enumerate(trees.order):
        after = shared[place + 1] if place + 1 < len(trees.order) else 0
        if after > stack[-1][0]:
            stack.append((after, []))
        stack[-1][1].append((completions.sizes[degree][item], [item]))
        while stack[-1][0] > after:
            depth, pieces = stack.pop()
            joined = _joined(sorted(pieces, key=lambda piece: (-piece[0], piece[1])), depth, room, members)
            if stack[-1][0] < after:
                stack.append((after, []))
            stack[-1][1].extend(joined)
    return [own for _, own in stack[0][1]]


def _joined(pieces: list[_Piece], common: int, room: int, members: int) -> list[_Piece]:
    """Join pieces with ``common`` tokens, the largest first, each with the first piece that has room for it."""
    joined: list[_Piece] = []
    with_room: list[int] = []
    for size, own in pieces:
        for number in with_room:
            other, theirs = joined[number]
            if len(theirs) + len(own) <= members and other + size - common <= room:
                joined[number] = other + size - common, theirs + own
                break
        else:
            number = len(joined)
            joined.append((size, own))
            with_room.append(number)
        total, theirs = joined[number]
        if len(theirs) == members or total + pieces[-1][0] - common > room:  # nothing more fits
            with_room.remove(number)
    return joined


def _longest_first(
    sizes: Mapping[int, list[int]], work: list[float], least: list[int], degrees: list[int], max_tokens: int
) -> list[list[int]] | None:
    """Put each item, longest first, into the bin with the least work per rank that has room for the item's tokens.

    ``degrees`` are those of the bins, ascending; an item goes into bins of at least the degree ``least`` [n], those
    with the largest first. This is the LPT rule of Graham (SIAM J. Appl. Math. 17, 1969) under a capacity. Returns None
    if an item fits into no bin.

    With one degree:

    *Every item finds room* if none exceeds `room` = B and bins >= 2 sum(sizes) / B: fewer than `bins` items are above
    B / 2. They come first, so each of them finds an empty bin. A smaller item would fail only if every bin held more
    than B / 2. Empty bins are lightest and have room: with at least `bins` items no bin stays empty.

    *The heaviest bin is below 2 mean + longest.* The items that it got while it was the lightest bin of all give it at
    most mean + longest. Let s be the tokens of its first item that was placed although a lighter bin existed, which was
    full. All bins then hold more than X = (B - s)(1 + c s): full bins have more than B - s tokens in items no shorter
    than s, and the other bins are no lighter than this bin, which is heavier than a full bin. So X < mean. From then
    on this bin, which holds an item no shorter than s, gets at most B - s tokens in items no longer than s: at most X.
    """
    packed: list[list[int]] = [[] for _ in degrees]
    kinds = {c: _Bins((b for b, own in enumerate(degrees) if own == c), c * max_tokens) for c in dict.fromkeys(degrees)}
    for item in sorted(range(len(work)), key=lambda i: (-least[i], -sizes[least[i]][i], i)):
        loads = {c: bins.least_load(sizes[c][item]) for c, bins in kinds.items() if c >= least[item]}
        loads = {c: load for c, load in loads.items() if load is not None}
        if not loads:
            return None
        degree = min(loads, key=lambda c: (loads[c], c))
        packed[kinds[degree].put(sizes[degree][item], work[item] / degree)].append(item)
    return packed


class _Bins:
    """Bins of one degree, with their loads and the room that they have left."""

    def __init__(self, numbers: Iterable[int], room: int):
        self._roomy = [(0.0, b, room) for b in numbers]  # heap of (work, bin, room)
        # Heap of (-room, work, bin): bins without room for an earlier, longer item.
        self._full: list[tuple[int, float, int]] = []

    def least_load(self, size: int) -> float | None:
        """Return the load of the lightest bin with room for ``size`` tokens, which `put` then takes; None: no room."""
        while self._full and -self._full[0][0] >= size:
            minus_room, load, b = heapq.heappop(self._full)
            heapq.heappush(self._roomy, (load, b, -minus_room))
        while self._roomy and self._roomy[0][2] < size:
            load, b, left = heapq.heappop(self._roomy)
            heapq.heappush(self._full, (-left, load, b))
        return self._roomy[0][0] if self._roomy else None

    def put(self, size: int, work: float) -> int:
        """Put an item of ``size`` tokens into the lightest bin with room; return the number of the bin."""
        load, b, left = self._roomy[0]
        heapq.heapreplace(self._roomy, (load + work, b, left - size))
        return b


def _descending(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda i: (-costs[i], i))
