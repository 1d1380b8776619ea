"""The promises of `schedule`'s docstring: as properties, and against brute force where the optimum can be found."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.data.schedule import schedule
from megatron_grpo.errors import GrpoError

sizes = st.integers(1, 1000)


def loads(lengths, result):
    """Tokens of every micro-batch, and of every rank."""
    packs = [[sum(lengths[i] for i in pack) for pack in rank] for rank in result]
    return [tokens for rank in packs for tokens in rank], [sum(rank) for rank in packs]


def check_every_completion_once_and_equal_counts(lengths, result, dp_size):
    assert len(result) == dp_size
    assert len({len(rank) for rank in result}) == 1
    assert all(pack for rank in result for pack in rank)
    assert sorted(i for rank in result for pack in rank for i in pack) == list(range(len(lengths)))


def check_spread(lengths, result, allowed):
    for values in loads(lengths, result):
        assert max(values) - min(values) <= allowed
        lower_bound = max(math.ceil(sum(lengths) / len(values)), max(lengths))  # no division has a smaller maximum
        assert max(values) <= lower_bound + allowed


def fewest_possible_maximum(lengths, bins):
    """The optimum by trying every assignment."""
    best = sum(lengths)
    for assignment in itertools.product(range(bins), repeat=len(lengths)):
        totals = [0] * bins
        for size, b in zip(lengths, assignment, strict=True):
            totals[b] += size
        best = min(best, max(totals))
    return best


def test_fixed_by_hand():
    # rounds of the four micro-batches: 8 7 6 5, then 4 3 2 1 to the lightest first -> {5,4} {6,3} {7,2} {8,1}: all 9
    assert schedule([1, 2, 3, 4, 5, 6, 7, 8], 2, micro_batch_size=2) == [[[0, 7], [2, 5]], [[1, 6], [3, 4]]]


def test_budget_by_hand():
    # 30 tokens, budget 10, two ranks: at least two micro-batches each; longest first into four: {9} {8} {6,1} {4,2}
    assert schedule([9, 1, 8, 2, 6, 4], 2, max_tokens=10) == [[[0], [3, 5]], [[2], [1, 4]]]


@settings(deadline=None)
@given(data=st.data(), dp_size=st.integers(1, 5), micro_batch_size=st.integers(1, 4), count=st.integers(1, 5))
def test_fixed(data, dp_size, micro_batch_size, count):
    n = dp_size * micro_batch_size * count
    lengths = data.draw(st.lists(sizes, min_size=n, max_size=n))
    result = schedule(lengths, dp_size, micro_batch_size=micro_batch_size)
    check_every_completion_once_and_equal_counts(lengths, result, dp_size)
    assert all(len(pack) == micro_batch_size for rank in result for pack in rank)
    check_spread(lengths, result, max(lengths) - min(lengths))
    for rank in result:
        tokens = [sum(lengths[i] for i in pack) for pack in rank]
        assert tokens == sorted(tokens, reverse=True)
    assert schedule(list(lengths), dp_size, micro_batch_size=micro_batch_size) == result


@settings(deadline=None)
@given(
    data=st.data(),
    dp_size=st.integers(1, 5),
    per_rank=st.integers(1, 12),
    slack=st.integers(0, 3000),
    min_microbatches=st.integers(1, 6),
)
def test_budget(data, dp_size, per_rank, slack, min_microbatches):
    lengths = data.draw(st.lists(sizes, min_size=dp_size * per_rank, max_size=dp_size * per_rank))
    max_tokens = max(lengths) + slack
    result = schedule(lengths, dp_size, max_tokens=max_tokens, min_microbatches=min_microbatches)
    check_every_completion_once_and_equal_counts(lengths, result, dp_size)
    pack_tokens, _ = loads(lengths, result)
    assert max(pack_tokens) <= max_tokens
    check_spread(lengths, result, max(lengths))
    count = len(result[0])
    assert count >= min(min_microbatches, per_rank)
    assert count <= max(min_microbatches, math.ceil(2 * sum(lengths) / (dp_size * max_tokens)))


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=7),
    dp_size=st.integers(1, 2),
    min_microbatches=st.integers(1, 2),
)
def test_budget_within_grahams_bound_of_the_optimum(lengths, dp_size, min_microbatches):
    result = schedule(lengths, dp_size, max_tokens=sum(lengths), min_microbatches=min_microbatches)
    pack_tokens, _ = loads(lengths, result)
    bins = len(pack_tokens)
    assert 3 * bins * max(pack_tokens) <= (4 * bins - 1) * fewest_possible_maximum(lengths, bins)


@settings(deadline=None)
@given(lengths=st.lists(sizes, min_size=1, max_size=30), dp_size=st.integers(1, 6), slack=st.integers(0, 500))
def test_budget_with_any_number_of_completions_is_right_or_refused(lengths, dp_size, slack):
    max_tokens = max(lengths) + slack
    try:
        result = schedule(lengths, dp_size, max_tokens=max_tokens)
    except GrpoError:
        assert len(lengths) % dp_size != 0
        return
    check_every_completion_once_and_equal_counts(lengths, result, dp_size)
    assert max(loads(lengths, result)[0]) <= max_tokens


def test_budget_replaces_the_micro_batch_size():
    assert schedule([5, 5], 1, micro_batch_size=1, max_tokens=10) == [[[0, 1]]]


def test_a_full_pipeline_when_n_allows():
    assert [len(rank) for rank in schedule([1] * 8, 2, max_tokens=100, min_microbatches=4)] == [4, 4]
    assert [len(rank) for rank in schedule([1] * 6, 2, max_tokens=100, min_microbatches=4)] == [3, 3]


def test_a_rollout_of_realistic_size_is_nearly_even():
    """512 completions of 100 to 1,123 tokens on 8 ranks: ranks within 1% of each other, few micro-batches wasted."""
    lengths = [100 + (i * i * 7919) % 1024 for i in range(512)]
    result = schedule(lengths, 8, max_tokens=8192)
    _, ranks = loads(lengths, result)
    assert max(ranks) <= 1.01 * min(ranks)
    assert len(result[0]) <= math.ceil(sum(lengths) / (8 * 8192)) + 1


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([5, 12, 3], {"max_tokens": 10}, r"completion 1 has 12 tokens.*--max-tokens-per-microbatch 10"),
        ([5], {"dp_size": 2, "max_tokens": 10}, "1 completions are too few for 2"),
        ([], {"max_tokens": 10}, "0 completions are too few"),
        ([10, 10, 10], {"dp_size": 2, "max_tokens": 10}, "3 completions do not fit into 2 micro-batches of 10"),
        ([1, 2, 3], {"micro_batch_size": 2}, "3 completions cannot be divided.*multiple of 2"),
        ([1, 2, 3, 4, 5, 6], {"dp_size": 4, "micro_batch_size": 1}, "6 completions cannot.* 4 data-parallel ranks"),
        ([], {"micro_batch_size": 1}, "0 completions cannot be divided"),
    ],
)
def test_refusals(lengths, options, message):
    with pytest.raises(GrpoError, match=message):
        schedule(lengths, **{"dp_size": 1} | options)


def test_one_of_the_two_modes_must_be_asked_for():
    with pytest.raises(ValueError, match="micro_batch_size or max_tokens"):
        schedule([1], 1)
