"""Advantages against hand-worked numbers, loops, subsets written out, torch.std; order and grouping must not matter."""

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithm import advantages as adv
from megatron_grpo.algorithm.advantages import STD_EPSILON, combine_rewards

NAN = math.nan


def f32(*values):
    return np.array(values, dtype=np.float32)


def group_advantages(rewards, groups, scale="group"):
    return adv.group_advantages(np.array(rewards, np.float32), np.array(groups, np.int64), scale)


def group_statistics(rewards, groups):
    return adv.group_statistics(np.array(rewards, np.float32), np.array(groups, np.int64))


def test_group_scale_by_hand():
    # mean 1/2; squared deviations 4 * 1/4 = 1; unbiased variance 1/3
    result = group_advantages([1, 0, 0, 1], [7, 7, 7, 7])
    a = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    np.testing.assert_allclose(result, [a, -a, -a, a], rtol=1e-6)
    assert result.dtype == np.float32


def test_batch_scale_and_none_by_hand():
    # groups {0, 2} (mean 1) and {3, 7} (mean 5); all four: mean 3, squares 9 + 1 + 0 + 16 = 26, variance 26/3
    rewards, groups = [0, 3, 2, 7], [4, -1, 4, -1]
    centred = np.array([-1, -2, 1, 2])
    np.testing.assert_array_equal(group_advantages(rewards, groups, "none"), centred)
    np.testing.assert_allclose(
        group_advantages(rewards, groups, "batch"), centred / (math.sqrt(26 / 3) + 1e-4), rtol=1e-6
    )


def test_rloo_by_hand():
    # 6 against the mean of 1 and 2; 1 against that of 6 and 2; 2 against that of 6 and 1; a second group of two
    rewards, groups = f32(6, 1, 10, 2, 4), np.array([0, 0, 1, 0, 1])
    np.testing.assert_allclose(adv.rloo_advantages(rewards, groups, "none"), [4.5, -3, 6, -1.5, -6], rtol=1e-6)


def test_reinforce_plus_plus_baseline_by_hand():
    # centred: -1, 1 and -3, 3: mean 0, squares 1 + 1 + 9 + 9 = 20, variance 20/3; the rewards' own std is larger
    result = adv.reinforce_plus_plus_baseline_advantages(f32(0, 2, 10, 16), np.array([5, 5, 2, 2]))
    np.testing.assert_allclose(result, np.array([-1, 1, -3, 3]) / (math.sqrt(20 / 3) + 1e-4), rtol=1e-6)


def test_pass_at_k_by_hand():
    """G = 4, k = 2, one right: of six pairs its three gain 1 each, so s = 1/2 and A = 4/2. With two right each gains
    in the two pairs with a wrong one only: s = 2/6, A = 4/3.
    """
    groups = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    result = adv.pass_at_k_advantages(f32(0, 1, 0, 0, 1, 0, 1, 0), groups, 2, "none")
    np.testing.assert_allclose(result, [0, 2, 0, 0, 4 / 3, 0, 4 / 3, 0], rtol=1e-6)
    # All four at a time: only what the best adds to the second best counts, 9 - 5, times G.
    np.testing.assert_allclose(adv.pass_at_k_advantages(f32(2, 9, 1, 5), groups[:4], 4, "none"), [0, 16, 0, 0])


def test_gdpo_by_hand():
    """Two functions of very different size: each is worth the same in its group of two, +-1/sqrt 2 a standard
    deviation.
    """
    rewards = np.array([[1, 0], [0, 100], [1, 100], [0, 0]], np.float32)
    z1, z100 = 0.5 / (math.sqrt(0.5) + 1e-4), 50 / (math.sqrt(5000) + 1e-4)
    total = [z1 - 2 * z100, -z1 + 2 * z100, z1 + 2 * z100, -z1 - 2 * z100]
    expected = np.array(total) / (statistics.stdev(total) + 1e-4)
    result = adv.gdpo_advantages(rewards, np.array([3, 3, 8, 8]), [1.0, 2.0])
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="1 reward weights"):
        adv.gdpo_advantages(rewards, np.array([3, 3, 8, 8]), [1.0])


def reinforce_plus_plus(rewards, lengths, masks, penalties=None, gamma=1.0):
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.array(masks, np.uint8)
    penalties = None if penalties is None else np.array(penalties, np.float64)
    return adv.reinforce_plus_plus_advantages(np.array(rewards, np.float32), penalties, mask, cu_seqlens, gamma)


def test_reinforce_plus_plus_by_hand():
    """Completions of 2, 1 and 2 tokens behind prompts of one, the third with a token that is not its own; the fourth
    is not scored. gamma 1/2: returns 0.5 * (4 - 0.5) - 1 = 0.75, 3.5; 2; -1 * 0.5 - 0 = -0.5, -1.
    """
    mask = [0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    penalties = [0, 1, 0.5, 0, 0, 0, 0, 7, 0, 0, 3]
    result = reinforce_plus_plus([4, 2, -1, NAN], [3, 2, 4, 2], mask, penalties, 0.5)
    returns = [0.75, 3.5, 2, -0.5, -1]
    expected = [(r - statistics.mean(returns)) / (statistics.stdev(returns) + 1e-4) for r in returns]
    np.testing.assert_allclose(result[np.array(mask[:-1] + [0]) == 1], expected, rtol=1e-6)
    assert not result[[0, 3, 5, 7, 9, 10]].any()


def test_reinforce_plus_plus_where_all_completions_are_alike():
    assert not reinforce_plus_plus([0.1] * 3, [2, 3, 4], [0, 1, 0, 1, 1, 0, 1, 1, 1]).any()
    assert reinforce_plus_plus([], [], []).shape == (0,)
    # A completion without a token in the loss takes its reward with it.
    assert not reinforce_plus_plus([5, 1, 1], [2, 2, 2], [0, 0, 0, 1, 0, 1]).any()


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_reinforce_plus_plus_against_a_loop(data):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    total, n = sum(lengths), len(lengths)
    mask = data.draw(st.lists(st.integers(0, 1), min_size=total, max_size=total))
    rewards = data.draw(st.lists(st.floats(-9, 9, width=32) | st.just(NAN), min_size=n, max_size=n))
    penalties = data.draw(st.lists(st.floats(-2, 2), min_size=total, max_size=total))
    gamma = data.draw(st.sampled_from([0.25, 0.9, 1.0]))
    returns, start = {}, 0
    for reward, length in zip(rewards, lengths, strict=True):
        future, first = 0.0, True
        for t in reversed(range(start, start + length)):
            if mask[t] and not math.isnan(reward):
                future = gamma * future - penalties[t] + (reward if first else 0.0)
                returns[t], first = future, False
        start += length
    result = reinforce_plus_plus(rewards, lengths, mask, penalties, gamma)
    values = list(returns.values())
    if len(values) > 1 and statistics.stdev(values) > 1e-6:
        expected = np.zeros(total)
        for t, value in returns.items():
            expected[t] = (value - statistics.fmean(values)) / (statistics.stdev(values) + STD_EPSILON)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert np.isfinite(result).all() and not result[np.array(mask) == 0].any()


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_order_does_not_matter_to_reinforce_plus_plus(data):
    """Completions in another order have the same advantages of their tokens, to the last bit."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=8))
    n, order = len(lengths), data.draw(st.permutations(range(len(lengths))))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    masks = [rng.integers(0, 2, length) for length in lengths]
    penalties = [rng.normal(size=length) for length in lengths]
    rewards = rng.normal(size=n).astype(np.float32)

    def estimate(order):
        chosen = [np.concatenate([values[i] for i in order]) for values in (masks, penalties)]
        a = reinforce_plus_plus(rewards[list(order)], [lengths[i] for i in order], *chosen, 0.9)
        return np.split(a, np.cumsum([lengths[i] for i in order])[:-1])

    result, shuffled = estimate(range(n)), estimate(order)
    for place, i in enumerate(order):
        np.testing.assert_array_equal(shuffled[place], result[i])


def estimators(f=1):
    """Every estimator of completions, as a function of (rewards [n, f], groups)."""
    total = lambda rewards: combine_rewards(rewards, [1.0] * f)  # noqa: E731
    by_scale = {
        f"{name} {scale}": lambda r, g, function=function, scale=scale: function(total(r), g, scale)
        for name, function in {
            "grpo": adv.group_advantages,
            "rloo": adv.rloo_advantages,
            "pass_at_k": lambda r, g, s: adv.pass_at_k_advantages(r, g, 2, s),
        }.items()
        for scale in ("group", "batch", "none")
    }
    return by_scale | {
        "baseline": lambda r, g: adv.reinforce_plus_plus_baseline_advantages(total(r), g),
        "gdpo": lambda r, g: adv.gdpo_advantages(r, g, [1.0] * f),
    }


def test_groups_that_teach_nothing():
    # equal rewards; one completion; nothing scored; one scored of two; and one group that does teach
    rewards = f32(*[0.1] * 7, 5.0, NAN, NAN, 3.0, NAN, 0.0, 1.0)
    groups = np.array([0] * 7 + [1, 2, 2, 3, 3, 4, 4])
    statistic = group_statistics(rewards, groups)
    assert (statistic.num_groups, statistic.zero_std_groups) == (5, 4)
    for name, estimate in estimators().items():
        result = estimate(rewards[:, None], groups)
        if name != "gdpo":  # which is centred over the batch once more
            np.testing.assert_array_equal(result[:12], np.zeros(12, np.float32))  # exactly: no rounding noise
        assert result[12] < result[13] and result[13] > 0


def test_a_completion_nobody_scored_changes_nobodys_advantage():
    for estimate in estimators().values():
        scored = estimate(f32(1, 2, 6)[:, None], np.zeros(3, np.int64))
        with_nan = estimate(f32(1, NAN, 2, 6)[:, None], np.zeros(4, np.int64))
        np.testing.assert_array_equal(with_nan, [scored[0], 0, scored[1], scored[2]])


@pytest.mark.parametrize("n", [0, 1])
def test_tiny_batches(n):
    for estimate in estimators().values():
        assert estimate(np.full((n, 1), 2, np.float32), np.zeros(n, np.int64)).tolist() == [0.0] * n


def test_what_is_no_scale_and_no_k():
    for function in (adv.group_advantages, adv.rloo_advantages):
        with pytest.raises(ValueError, match="mad"):
            function(f32(1, 2), np.zeros(2, np.int64), "mad")
    with pytest.raises(ValueError, match="at least 2, not 1"):
        adv.pass_at_k_advantages(f32(1, 2), np.zeros(2, np.int64), 1, "none")


finite = st.floats(-100, 100, width=32)


@st.composite
def scored_groups(draw, functions=1):
    n = draw(st.integers(2, 20))
    groups = draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n))
    rewards = draw(st.lists(finite | st.just(NAN), min_size=n * functions, max_size=n * functions))
    return np.array(rewards, np.float32).reshape(n, functions), np.array(groups), draw(st.permutations(range(n)))


@settings(deadline=None, max_examples=40)
@given(scored_groups(functions=2))
def test_order_does_not_matter(drawn):
    """Another order of the completions gives the same advantages, to the last bit."""
    rewards, groups, order = drawn
    for name, estimate in estimators(f=2).items():
        result, shuffled = estimate(rewards, groups), estimate(rewards[order], groups[order])
        np.testing.assert_array_equal(shuffled, result[list(order)], err_msg=name)
        assert np.isfinite(result).all()
    total = combine_rewards(rewards, [1.0, 1.0])
    assert group_statistics(total, groups) == group_statistics(total[order], groups[order])


@settings(deadline=None, max_examples=40)
@given(scored_groups())
def test_against_loops_over_the_group(drawn):
    """Every formula as its paper has it, one completion at a time in float64, with statistics and torch.std."""
    rewards, groups, _ = drawn
    r, n = rewards[:, 0].astype(np.float64), len(groups)
    scored = [v for v in r if not math.isnan(v)]
    batch_std = torch.tensor(scored, dtype=torch.float64).std().item() if len(scored) > 1 else 0.0
    expected = {name: np.zeros(n) for name in estimators()}
    centred = {}
    for i in range(n):
        mates = [j for j in range(n) if groups[j] == groups[i] and not math.isnan(r[j])]
        if math.isnan(r[i]):
            continue
        centred[i] = r[i] - statistics.fmean(r[mates])
        if len(mates) < 2 or max(r[mates]) == min(r[mates]):
            continue
        others = [r[j] for j in mates if j != i]
        pairs = sum(max(r[i], other) - other for other in others)
        raw = {
            "grpo": centred[i],
            "rloo": r[i] - statistics.fmean(others),
            "pass_at_k": len(mates) * pairs / math.comb(len(mates), 2),
        }
        for name, value in raw.items():
            expected[f"{name} none"][i] = value
            expected[f"{name} batch"][i] = value / (batch_std + STD_EPSILON)
            expected[f"{name} group"][i] = value / (statistics.stdev(r[mates]) + STD_EPSILON)
    std = statistics.stdev(centred.values()) if len(centred) > 1 else 0.0
    for i, value in centred.items():
        expected["baseline"][i] = value / (std + STD_EPSILON)
    if len(scored) > 1:
        known = [i for i in range(n) if not math.isnan(r[i])]
        z = expected["grpo group"][known]
        expected["gdpo"][known] = (z - z.mean()) / (z.std(ddof=1) + STD_EPSILON)
    for name, estimate in estimators().items():
        np.testing.assert_allclose(estimate(rewards, groups), expected[name], rtol=2e-6, atol=2e-6, err_msg=name)


@settings(deadline=None, max_examples=40)
@given(values=st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=7), k=st.integers(2, 7))
def test_pass_at_k_against_all_subsets(values, k):
    size = len(values)
    result = adv.pass_at_k_advantages(f32(*values), np.zeros(size, np.int64), k, "none")
    subsets = list(itertools.combinations(range(size), k))
    expected = np.zeros(size)
    for subset in subsets:
        for i in subset:
            expected[i] += max(values[j] for j in subset) - max(values[j] for j in subset if j != i)
    np.testing.assert_allclose(result, expected * size / max(len(subsets), 1), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pass_at_k_is_unbiased(k):
    """Exact expectation over all draws of four completions from a policy over three answers: the mean of A_i d log p_i
    is the gradient of E[max of k].
    """
    logits = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    log_p, value = logits.log_softmax(0), torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)
    objective = sum(
        log_p[list(draw)].sum().exp() * value[list(draw)].max() for draw in itertools.product(range(3), repeat=k)
    )
    surrogate = 0.0
    for draw in map(list, itertools.product(range(3), repeat=4)):
        a = adv.pass_at_k_advantages(value[draw].numpy().astype(np.float32), np.zeros(4, np.int64), k, "none")
        surrogate = surrogate + log_p[draw].sum().exp().detach() * (torch.from_numpy(a) * log_p[draw]).mean()
    (wanted,) = torch.autograd.grad(objective, logits, retain_graph=True)
    (ours,) = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


def test_pass_at_k_of_a_large_group():
    """C(2048, 512) is beyond float64: one right completion in 2048 is in 512/2048 of the subsets."""
    rewards = np.zeros(2048, np.float32)
    rewards[77] = 1
    result = adv.pass_at_k_advantages(rewards, np.zeros(2048, np.int64), 512, "none")
    assert result[77] == pytest.approx(512, rel=1e-6) and np.count_nonzero(result) == 1


def test_combine_rewards_by_hand():
    rewards = np.array([[1, 2], [1, NAN], [NAN, 2], [NAN, NAN], [0, 0]], np.float32)
    np.testing.assert_array_equal(combine_rewards(rewards, [0.5, 2.0]), f32(4.5, 0.5, 4.0, NAN, 0.0))
    assert combine_rewards(rewards, [0.5, 2.0]).dtype == np.float32


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.5), (0.7, 0.3), (0.1, 0.9)])
@pytest.mark.parametrize("unit", [0.1, 1e-9, 1e7])
def test_equal_sums_of_tenths_are_equal(weights, unit):
    """By fractions: float32 holds no tenth, and the difference would be a preference."""
    pairs = [(a, b) for a in range(11) for b in range(-10, 11)]
    exact = [sum(Fraction(str(w)) * n for w, n in zip(weights, pair, strict=True)) for pair in pairs]
    total = combine_rewards(np.array(pairs, np.float32) * np.float32(unit), weights)
    ranks = {value: number for number, value in enumerate(sorted(set(exact)))}
    _, found = np.unique(total, return_inverse=True)
    np.testing.assert_array_equal(found, [ranks[value] for value in exact])
    np.testing.assert_allclose(total, [float(value) * unit for value in exact], rtol=1e-6, atol=1e-6 * unit)


def test_rewards_of_one_function_keep_their_bits():
    rewards = np.array([[1234567, NAN], [1234568, NAN], [NAN, 1 / 3]], np.float32)
    np.testing.assert_array_equal(combine_rewards(rewards, [1.0, 1.0]), np.nan_to_num(rewards).sum(1))


def test_combine_rewards_refuses_another_number_of_weights():
    with pytest.raises(ValueError, match="1 reward weights"):
        combine_rewards(np.zeros((3, 2), np.float32), [1.0])


@settings(deadline=None)
@given(st.lists(finite, min_size=3, max_size=3), st.integers(2, 9))
def test_equal_rows_of_rewards_have_equal_sums(row, n):
    total = combine_rewards(np.array([row] * n, np.float32), [0.1, 0.7, 1.3])
    assert len(set(total.tolist())) == 1
    assert group_statistics(total, [0] * n).zero_std_groups == 1


def test_mean_standard_deviation_of_groups():
    """Group 0: rewards 1 and 0, unbiased std sqrt(1/2); group 1: equal rewards; group 2: a single scored one."""
    result = group_statistics([1, 1, 0, 1, 5, NAN], [0, 1, 0, 1, 2, 2])
    assert result.mean_std == pytest.approx(0.5**0.5 / 3)
    assert (result.num_groups, result.zero_std_groups) == (3, 2)
