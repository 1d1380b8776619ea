"""The promises of `schedule`'s docstring: as properties, and against brute force where the optimum can be found."""

import itertools
import math
import time
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from megatron_grpo.data.prefix_tree import Prefixes
from megatron_grpo.data.schedule import attention_coefficient, hybrid_schedule, schedule
from megatron_grpo.utils.errors import GrpoError

sizes = st.integers(1, 1000)
coefficients = st.sampled_from([0.0, 1e-4, 0.01, 1.0])
ROUNDING = 1e-9  # work is a float: sums in another order differ in the last digits


def work_of(lengths, coefficient):
    return [length + coefficient * length**2 for length in lengths]


def loads(values, result):
    """The sum of `values` over each micro-batch, and over each rank."""
    packs = [[sum(values[i] for i in pack) for pack in rank] for rank in result]
    return [load for rank in packs for load in rank], [sum(rank) for rank in packs]


def spread(values):
    return max(values) - min(values)


def check_every_completion_once_and_equal_counts(lengths, result, dp_size, multiple):
    assert len(result) == dp_size
    assert len({len(rank) for rank in result}) == 1
    assert len(result[0]) % multiple == 0
    assert all(pack for rank in result for pack in rank) or len(lengths) % (dp_size * multiple)
    assert sorted(i for rank in result for pack in rank for i in pack) == list(range(len(lengths)))


def check_order_and_ranks(work, result):
    """Heaviest first; the ranks' totals differ, and exceed the best possible ones, by no more than the micro-batches
    do.
    """
    packs, ranks = loads(work, result)
    for rank in result:
        in_rank = [sum(work[i] for i in pack) for pack in rank]
        assert all(a >= b * (1 - ROUNDING) for a, b in itertools.pairwise(in_rank))
    assert spread(ranks) <= spread(packs) + ROUNDING * max(ranks)
    assert max(ranks) <= sum(work) / len(ranks) + spread(packs) + ROUNDING * max(ranks)  # no maximum is below the mean


def least_possible_maximum(work, bins, allowed=lambda groups: True):
    """The optimum by trying every assignment of at most 8 items to bins that are alike."""
    best = math.inf

    def assign(groups, item):
        nonlocal best
        if item == len(work):
            if allowed(groups):
                best = min(best, max(sum(work[i] for i in group) for group in groups))
            return
        for b in range(bins):
            groups[b].append(item)
            assign(groups, item + 1)
            groups[b].pop()
            if not groups[b]:
                break  # the further empty bins are the same

    assign([[] for _ in range(bins)], 0)
    return best


# ---- by hand


def test_fixed_by_hand():
    # rounds of the four micro-batches: 8 7 6 5, then 4 3 2 1 to the lightest first -> {5,4} {6,3} {7,2} {8,1}: all 9
    assert schedule([1, 2, 3, 4, 5, 6, 7, 8], 2, micro_batch_size=2) == [[[0, 7], [2, 5]], [[1, 6], [3, 4]]]


def test_budget_by_hand():
    # 30 tokens, budget 10, two ranks: at least two micro-batches each; longest first into four: {9} {8} {6,1} {4,2}
    assert schedule([9, 1, 8, 2, 6, 4], 2, max_tokens=10) == [[[0], [3, 5]], [[2], [1, 4]]]


def test_work_by_hand():
    # c = 1, work 6: 42, 2: 6. By tokens {6} {2,2,2}; by work also while there is room for all the short ones ...
    assert schedule([6, 2, 2, 2, 2], 1, max_tokens=8, attention_coefficient=1.0) == [[[0], [1, 2, 3, 4]]]
    # (by tokens the fourth short one goes to the long one: 8 and 6, work 48 and 18)
    assert schedule([6, 2, 2, 2, 2], 1, max_tokens=8) == [[[0, 4], [1, 2, 3]]]
    # ... and the budget of 7 lets neither {6, 2} nor {2,2,2,2} pass: the next M
    assert schedule([6, 2, 2, 2, 2], 1, max_tokens=7, attention_coefficient=1.0) == [[[0], [1, 3], [2, 4]]]


def test_budget_overrules_work_by_hand():
    # c = 1: 20 goes to the first, ten of 2 to the second, which is full then (work 60 against 420): 1 joins the 20
    result = schedule([20, *[2] * 10, 1], 1, max_tokens=21, attention_coefficient=1.0)
    assert result == [[[0], list(range(1, 12))]]
    result = schedule([19, *[2] * 10, 1], 1, max_tokens=20, attention_coefficient=1.0)
    assert result == [[[0, 11], list(range(1, 11))]]


def test_attention_coefficient_of_a_published_shape():
    # Llama 3 8B: hidden 4096, 32 heads and 8 groups of 128, feed-forward 14336: 218,103,808 weights a layer
    assert attention_coefficient(4096, 32 * 128, 8 * 128, 14336) == pytest.approx(4096 / 218_103_808)


def test_attention_coefficient_is_what_torch_counts():
    """The flops, forward and backward, of one layer written in plain torch, counted by torch."""
    hidden, heads, groups, head_size, ffn, length = 24, 4, 2, 8, 40, 12
    x = torch.randn(length, hidden, requires_grad=True)

    def weight(*shape):
        return torch.randn(*shape, requires_grad=True)

    with FlopCounterMode(display=False) as linear:
        q, k, v = (x @ weight(hidden, n * head_size) for n in (heads, groups, groups))
        inner = (x @ weight(hidden, ffn)).sigmoid() * (x @ weight(hidden, ffn))
        out = inner @ weight(ffn, hidden) + q @ weight(heads * head_size, hidden)
        (out.sum() + k.sum() + v.sum()).backward()
    q, k, v = (torch.randn(heads, length, head_size, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as attention:
        ((q @ k.transpose(1, 2)).softmax(-1) @ v).sum().backward()
    coefficient = attention_coefficient(hidden, heads * head_size, groups * head_size, ffn)
    assert attention.get_total_flops() / 2 == coefficient * length * linear.get_total_flops()  # half is masked


# ---- the promises


@settings(deadline=None)
@given(
    data=st.data(),
    dp_size=st.integers(1, 4),
    micro_batch_size=st.integers(1, 3),
    groups=st.integers(1, 3),
    multiple=st.integers(1, 3),
    coefficient=coefficients,
)
def test_fixed(data, dp_size, micro_batch_size, groups, multiple, coefficient):
    n = dp_size * micro_batch_size * groups * multiple
    lengths = data.draw(st.lists(sizes, min_size=n, max_size=n))
    options = {"micro_batch_size": micro_batch_size, "microbatch_multiple": multiple}
    result = schedule(lengths, dp_size, **options, attention_coefficient=coefficient)
    check_every_completion_once_and_equal_counts(lengths, result, dp_size, multiple)
    assert all(len(pack) == micro_batch_size for rank in result for pack in rank)
    work = work_of(lengths, coefficient)
    check_order_and_ranks(work, result)
    assert spread(loads(work, result)[0]) <= spread(work) + ROUNDING * sum(work)
    assert schedule(np.array(lengths), dp_size, **options, attention_coefficient=coefficient) == result


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=4, max_size=8), coefficient=coefficients)
def test_fixed_beside_the_optimum(lengths, coefficient):
    lengths = lengths[: len(lengths) // 2 * 2]
    work = work_of(lengths, coefficient)
    packs, _ = loads(work, schedule(lengths, 1, micro_batch_size=2, attention_coefficient=coefficient))
    best = least_possible_maximum(work, len(packs), lambda groups: all(len(group) == 2 for group in groups))
    assert best * (1 - ROUNDING) <= max(packs) <= best + spread(work) + ROUNDING * sum(work)


# Long and short ones apart, so that many short ones fill a budget with little work.
two_kinds = st.one_of(sizes, st.integers(1, 20), st.integers(400, 1000))


@settings(deadline=None)
@given(
    data=st.data(),
    dp_size=st.integers(1, 4),
    per_rank=st.integers(1, 12),
    slack=st.integers(0, 3000),
    multiple=st.integers(1, 4),
    coefficient=coefficients,
)
def test_budget(data, dp_size, per_rank, slack, multiple, coefficient):
    n = dp_size * math.ceil(per_rank / multiple) * multiple
    lengths = data.draw(st.lists(two_kinds, min_size=n, max_size=n))
    max_tokens = max(lengths) + slack
    options = {"max_tokens": max_tokens, "microbatch_multiple": multiple, "attention_coefficient": coefficient}
    result = schedule(lengths, dp_size, **options)  # never refused: n is a multiple of both
    check_every_completion_once_and_equal_counts(lengths, result, dp_size, multiple)
    assert max(loads(lengths, result)[0]) <= max_tokens
    enough = math.ceil(2 * sum(lengths) / (dp_size * max_tokens))
    assert len(result[0]) <= math.ceil(enough / multiple) * multiple

    work = work_of(lengths, coefficient)
    check_order_and_ranks(work, result)
    rounding = ROUNDING * sum(work)
    packs = [pack for rank in result for pack in rank]
    totals, _ = loads(work, result)
    tokens, _ = loads(lengths, result)
    assert max(totals) <= 2 * sum(work) / len(packs) + max(work) + rounding
    for a, b in itertools.permutations(range(len(packs)), 2):
        shortest = min(lengths[i] for i in packs[a])
        excess = totals[a] - totals[b] - (shortest + coefficient * shortest**2)
        assert excess <= rounding or tokens[b] + shortest > max_tokens
    if coefficient == 0.0 or max_tokens >= sum(lengths):
        assert spread(totals) <= max(work) + rounding


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=4, max_size=8),
    multiple=st.integers(1, 4),
    slack=st.integers(0, 60),
    coefficient=coefficients,
)
def test_budget_beside_the_optimum(lengths, multiple, slack, coefficient):
    """Below 3 times it; within Graham's bound when there is room for all or only tokens count; M within its own."""
    lengths = lengths[: len(lengths) // multiple * multiple]
    work = work_of(lengths, coefficient)
    options = {"microbatch_multiple": multiple, "attention_coefficient": coefficient}

    packs, _ = loads(work, schedule(lengths, 1, max_tokens=sum(lengths), **options))
    best = least_possible_maximum(work, len(packs))
    assert best * (1 - ROUNDING) <= max(packs)
    assert 3 * len(packs) * max(packs) <= (4 * len(packs) - 1) * best * (1 + ROUNDING)

    max_tokens = max(lengths) + slack
    packs, _ = loads(work, schedule(lengths, 1, max_tokens=max_tokens, **options))
    best = least_possible_maximum(
        work, len(packs), lambda groups: all(sum(lengths[i] for i in group) <= max_tokens for group in groups)
    )
    assert best * (1 - ROUNDING) <= max(packs) < 3 * best
    if coefficient == 0.0:
        assert 3 * len(packs) * max(packs) <= (4 * len(packs) - 1) * best
    if multiple == 1:
        for fewer in range(1, math.ceil(len(packs) / 2)):  # fewer than half as many are too few
            assert least_possible_maximum(lengths, fewer) > max_tokens


@settings(deadline=None)
@given(
    lengths=st.lists(sizes, min_size=1, max_size=30),
    dp_size=st.integers(1, 6),
    slack=st.integers(0, 500),
    multiple=st.integers(1, 3),
)
def test_budget_with_any_number_of_completions(lengths, dp_size, slack, multiple):
    max_tokens = max(lengths) + slack
    result = schedule(lengths, dp_size, max_tokens=max_tokens, microbatch_multiple=multiple)
    check_every_completion_once_and_equal_counts(lengths, result, dp_size, multiple)
    check_order_and_ranks(lengths, result)
    assert max(loads(lengths, result)[0]) <= max_tokens


def test_empty_micro_batches_by_hand():
    """Completions that share no micro-batch, and whose number is no multiple of the ranks'."""
    assert schedule([9, 10, 8], 2, max_tokens=10) == [[[1], []], [[0], [2]]]
    assert schedule([10] * 6, 1, max_tokens=10, microbatch_multiple=4) == [[[i] for i in range(6)] + [[], []]]
    assert schedule([5], 2, max_tokens=10) == [[[0]], [[]]]
    # Groups of three micro-batches on each of two ranks: six for five completions.
    assert schedule([5] * 5, 2, max_tokens=10, microbatch_multiple=3) == [[[0], [2], [4]], [[1], [3], []]]
    # Of degree 2: three micro-batches of two context-parallel ranks, on two data-parallel ranks.
    assert hybrid_schedule([19, 20, 18], 2, 2, max_tokens=10) == (
        [2, 2],
        [[[1], []], [[1], []], [[0], [2]], [[0], [2]]],
    )


def test_answers_that_grow_beyond_half_a_micro_batch():
    """64 completions on 6 ranks, each with a micro-batch of its own: ceil(64 / 6) = 11 a rank, two of 66 empty."""
    result = schedule([4296] * 64, 6, max_tokens=4608)
    assert [len(rank) for rank in result] == [11] * 6
    assert sorted(len(pack) for rank in result for pack in rank) == [0, 0] + [1] * 64


def test_common_beginnings_spare_empty_micro_batches():
    """Two completions of 9 tokens, 6 of them common, have 13 together: the last common one begins both branches."""
    prefixes = Prefixes(order=np.arange(3), common=np.array([0, 6, 6]))
    assert schedule([9, 9, 9], 2, max_tokens=13) == [[[0], [2]], [[1], []]]
    assert schedule([9, 9, 9], 2, max_tokens=13, prefixes=prefixes) == [[[0, 1]], [[2]]]


def test_budget_replaces_the_micro_batch_size():
    assert schedule([5, 5], 1, micro_batch_size=1, max_tokens=10) == [[[0, 1]]]


def test_together_by_hand():
    # Two rows with four completions of 4 tokens, budget 12: three and one; the lone ones share a pack.
    lengths, rows = [4] * 8, [7, 7, 7, 7, 3, 3, 3, 3]
    assert schedule(lengths, 1, max_tokens=12, together=rows) == [[[0, 1, 2], [4, 5, 6], [3, 7]]]
    assert schedule(lengths, 1, max_tokens=12) == [[[0, 3, 6], [1, 4, 7], [2, 5]]]


@settings(deadline=None)
@given(
    lengths=st.lists(sizes, min_size=1, max_size=40),
    rows=st.integers(1, 8),
    dp_size=st.integers(1, 4),
    slack=st.integers(0, 2000),
    multiple=st.integers(1, 3),
)
def test_together_keeps_the_promises_of_a_budget(lengths, rows, dp_size, slack, multiple):
    """The schedule has at most a quarter more micro-batches than without ``together``."""
    options = {"max_tokens": max(lengths) + slack, "microbatch_multiple": multiple}
    rows = [number % rows for number in range(len(lengths))]
    plain = schedule(lengths, dp_size, **options)
    result = schedule(lengths, dp_size, **options, together=rows)
    check_every_completion_once_and_equal_counts(lengths, result, dp_size, multiple)
    check_order_and_ranks(lengths, result)
    assert max(loads(lengths, result)[0]) <= options["max_tokens"]
    assert len(result[0]) <= 5 / 4 * len(plain[0])


def test_images_are_encoded_less_often():
    """16 rows of a megapixel (1,400 tokens) with eight completions each, log-normal lengths, packs of 16,384 tokens."""
    normal = NormalDist(math.log(512), 0.8)
    drawn = [min(int(math.exp(normal.inv_cdf((i * 37 % 128 + 0.5) / 128))), 4096) for i in range(128)]
    lengths, rows = [1400 + length for length in drawn], [i // 8 for i in range(128)]

    def encodings(result):
        return sum(len({rows[i] for i in pack}) for rank in result for pack in rank)

    together, alone = (schedule(lengths, 2, max_tokens=16384, together=given) for given in (rows, None))
    assert len(together[0]) <= len(alone[0]) + 1
    assert encodings(together) <= 2 * 16 and encodings(alone) > 5 * 16
    _, ranks = loads(lengths, together)
    assert max(ranks) < 1.1 * min(ranks)


def test_whole_groups_of_micro_batches():
    assert [len(rank) for rank in schedule([1] * 8, 2, max_tokens=100, microbatch_multiple=4)] == [4, 4]
    assert [len(rank) for rank in schedule([60] * 20, 2, max_tokens=120, microbatch_multiple=4)] == [8, 8]  # 5 would do


# ---- with a context-parallel degree for each micro-batch


def test_hybrid_by_hand():
    # Two context ranks of 10 tokens: 17 is padded to 20 and needs both. 44 tokens take three micro-batches; the other
    # completions go to four packs of one rank, {9} {8} {5} {4,1}. In the last round the lighter rank has the 8.
    degrees, ranks = hybrid_schedule([17, 9, 8, 5, 4, 1], 1, 2, max_tokens=10)
    assert degrees == [2, 1, 1]
    assert ranks == [[[0], [1], [4, 5]], [[0], [2], [3]]]


def test_hybrid_fills_packs_of_a_larger_degree_by_hand():
    # Of two data-parallel ranks only one has a sequence of degree 2: the other shares 6 and 2 (padded to 8 and 4).
    assert hybrid_schedule([18, 6, 2], 2, 2, max_tokens=10) == ([2], [[[0]], [[0]], [[1, 2]], [[1, 2]]])


def test_too_few_completions_for_packs_of_one_rank_by_hand():
    # Four ranks and two completions: packs of two ranks.
    assert hybrid_schedule([5, 5], 1, 4, max_tokens=10) == ([2], [[[0]], [[0]], [[1]], [[1]]])


@settings(deadline=None)
@given(
    data=st.data(),
    dp_size=st.integers(1, 3),
    cp_size=st.sampled_from([1, 2, 4, 8]),
    per_rank=st.integers(1, 24),
    max_tokens=st.integers(150, 1200),
    multiple=st.integers(1, 3),
    coefficient=coefficients,
    rows=st.one_of(st.none(), st.integers(1, 6)),
)
def test_hybrid(data, dp_size, cp_size, per_rank, max_tokens, multiple, coefficient, rows):
    n = dp_size * math.ceil(per_rank / multiple) * multiple
    longest = min(1000, max_tokens * cp_size // (2 * cp_size) * 2 * cp_size)
    lengths = [min(length, longest) for length in data.draw(st.lists(two_kinds, min_size=n, max_size=n))]
    together = None if rows is None else [i % rows for i in range(n)]
    options = {"microbatch_multiple": multiple, "attention_coefficient": coefficient, "together": together}
    degrees, ranks = hybrid_schedule(lengths, dp_size, cp_size, max_tokens, **options)  # never refused, as above
    assert len(ranks) == dp_size * cp_size
    assert {len(rank) for rank in ranks} == {len(degrees)} and len(degrees) % multiple == 0
    assert all(pack for rank in ranks for pack in rank)
    assert hybrid_schedule(np.array(lengths), dp_size, cp_size, max_tokens, **options) == (degrees, ranks)

    seen, work = [], [0.0] * len(ranks)
    of_lengths = work_of(lengths, coefficient)
    spreads, now = [], []
    for number, degree in enumerate(degrees):
        assert cp_size % degree == 0
        now = []
        for first in range(0, len(ranks), degree):
            shared = ranks[first][number]
            assert all(rank[number] == shared for rank in ranks[first : first + degree])
            multiple_of = 2 * degree if degree > 1 else 1
            assert sum(math.ceil(lengths[i] / multiple_of) * multiple_of for i in shared) <= degree * max_tokens
            seen += shared
            now.append(sum(of_lengths[i] for i in shared) / degree)
            for rank in range(first, first + degree):
                work[rank] += now[-1]
        spreads.append(spread(now))
    assert sorted(seen) == list(range(n))
    assert degrees == sorted(degrees, reverse=True)
    assert spread(work) <= max(spreads) + ROUNDING * sum(of_lengths)


@settings(deadline=None)
@given(
    data=st.data(),
    dp_size=st.integers(1, 3),
    cp_size=st.sampled_from([1, 2, 4]),
    per_rank=st.integers(1, 12),
    coefficient=coefficients,
)
def test_hybrid_of_short_sequences_is_data_parallelism(data, dp_size, cp_size, per_rank, coefficient):
    ranks = dp_size * cp_size
    lengths = data.draw(st.lists(two_kinds, min_size=ranks * per_rank, max_size=ranks * per_rank))
    result = schedule(lengths, ranks, max_tokens=1000, attention_coefficient=coefficient)
    degrees = [1] * len(result[0])
    assert hybrid_schedule(lengths, dp_size, cp_size, 1000, attention_coefficient=coefficient) == (degrees, result)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_hybrid_refuses_what_context_parallelism_refuses(dp_size):
    with pytest.raises(GrpoError, match=r"completion 1 has 24 tokens.*microbatch 10 x --context-parallel-size 2"):
        hybrid_schedule([5, 21, 5], dp_size, 2, max_tokens=10)
    with pytest.raises(GrpoError, match="no completions"):
        hybrid_schedule([], dp_size, 2, max_tokens=10)


@pytest.mark.parametrize("cp_size", [4, 8])
def test_hybrid_keeps_ranks_in_step_on_a_long_tail(cp_size):
    """512 completions, log-normal lengths (median 700, at most 32,768), the shape of Qwen3-4B; the longest fits."""
    normal = NormalDist(math.log(700), 1.2)
    lengths = [min(int(math.exp(normal.inv_cdf((i + 0.5) / 512))), 32768) for i in range(512)]
    coefficient = attention_coefficient(2560, 4096, 1024, 9728)
    work = work_of(lengths, coefficient)
    degrees, ranks = hybrid_schedule(lengths, 1, cp_size, 32768 // cp_size, attention_coefficient=coefficient)
    in_step = sum(
        max(sum(work[i] for i in rank[number]) for rank in ranks) / degree for number, degree in enumerate(degrees)
    )
    assert in_step < 1.15 * sum(work) / cp_size
    alone = sum(length for length in lengths if length <= 32768 // cp_size)
    unsplit = {i for number, degree in enumerate(degrees) if degree == 1 for rank in ranks for i in rank[number]}
    assert sum(lengths[i] for i in unsplit) > 0.6 * alone


# ---- a rollout of realistic size


def test_work_keeps_ranks_in_step_where_tokens_do_not():
    """512 completions on 8 ranks, log-normal lengths (median 1,800 tokens, at most 16,384), the shape of Qwen3-0.6B."""
    normal = NormalDist(math.log(1800), 0.8)
    lengths = [min(int(math.exp(normal.inv_cdf((i + 0.5) / 512))), 16384) for i in range(512)]
    coefficient = attention_coefficient(1024, 2048, 1024, 3072)
    work = work_of(lengths, coefficient)

    def slowest_in_step(c):
        """Number of micro-batches; and the time over the mean when the ranks wait for each other after each one."""
        result = schedule(lengths, 8, max_tokens=32768, attention_coefficient=c)
        packs = [[sum(work[i] for i in pack) for pack in rank] for rank in result]
        return len(packs[0]), sum(map(max, zip(*packs, strict=True))) * len(packs) / sum(work)

    by_tokens, by_work = slowest_in_step(0.0), slowest_in_step(coefficient)
    assert by_work[0] == by_tokens[0] == math.ceil(sum(lengths) / (8 * 32768))
    assert by_work[1] < 1.03 < 1.2 < by_tokens[1]


def test_a_large_schedule_takes_no_time():
    """8,192 completions on 64 ranks: 0.01 s of CPU time when this was written."""
    lengths = [100 + (i * i * 7919) % 8192 for i in range(8192)]
    begin = time.process_time()
    result = schedule(lengths, 64, max_tokens=16384, microbatch_multiple=4, attention_coefficient=1e-4)
    assert time.process_time() - begin < 1.0
    _, ranks = loads(work_of(lengths, 1e-4), result)
    assert max(ranks) <= 1.001 * min(ranks)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([5, 12, 3], {"max_tokens": 10}, r"completion 1 has 12 tokens.*--max-tokens-per-microbatch 10"),
        ([], {"max_tokens": 10}, "no completions.*--global-batch-size"),
        ([1, 2, 3], {"micro_batch_size": 2}, "3 completions cannot be divided.*multiple of 2"),
        ([1, 2, 3, 4, 5, 6], {"dp_size": 4, "micro_batch_size": 1}, "6 completions cannot.* 4 data-parallel ranks"),
        ([], {"micro_batch_size": 1}, "0 completions cannot be divided"),
        ([1] * 6, {"micro_batch_size": 1, "microbatch_multiple": 4}, "in groups of 4.*multiple of 4"),
    ],
)
def test_refusals(lengths, options, message):
    with pytest.raises(GrpoError, match=message):
        schedule(lengths, **{"dp_size": 1} | options)


def test_one_of_the_two_modes_must_be_asked_for():
    with pytest.raises(ValueError, match="micro_batch_size or max_tokens"):
        schedule([1], 1)
