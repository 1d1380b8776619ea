"""Advantages against hand-worked numbers, `statistics` and torch.std; order and grouping must not matter."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithm.advantages import STD_EPSILON, combine_rewards, group_advantages

NAN = math.nan


def f32(*values):
    return np.array(values, dtype=np.float32)


def advantages(rewards, groups, scale="group"):
    return group_advantages(np.array(rewards, np.float32), np.array(groups, np.int64), scale)


def test_group_scale_by_hand():
    # mean 1/2; squared deviations 4 * 1/4 = 1; unbiased variance 1/3
    result = advantages([1, 0, 0, 1], [7, 7, 7, 7])
    a = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    np.testing.assert_allclose(result.advantages, [a, -a, -a, a], rtol=1e-6)
    assert (result.num_groups, result.zero_std_groups) == (1, 0)
    assert result.advantages.dtype == np.float32


def test_batch_scale_and_none_by_hand():
    # groups {0, 2} (mean 1) and {3, 7} (mean 5); all four: mean 3, squares 9 + 1 + 0 + 16 = 26, variance 26/3
    rewards, groups = [0, 3, 2, 7], [4, -1, 4, -1]
    centred = np.array([-1, -2, 1, 2])
    np.testing.assert_array_equal(advantages(rewards, groups, "none").advantages, centred)
    np.testing.assert_allclose(
        advantages(rewards, groups, "batch").advantages, centred / (math.sqrt(26 / 3) + 1e-4), rtol=1e-6
    )


def test_groups_that_teach_nothing():
    # equal rewards; one completion; nothing scored; one scored of two; and one group that does teach
    rewards = [0.1] * 7 + [5.0, NAN, NAN, 3.0, NAN, 0.0, 1.0]
    groups = [0] * 7 + [1, 2, 2, 3, 3, 4, 4]
    for scale in ("group", "batch", "none"):
        result = advantages(rewards, groups, scale)
        assert (result.num_groups, result.zero_std_groups) == (5, 4)
        np.testing.assert_array_equal(result.advantages[:12], np.zeros(12, np.float32))  # exactly: no rounding noise
        assert result.advantages[12] < 0 < result.advantages[13]


def test_a_completion_nobody_scored_changes_nobodys_advantage():
    scored = advantages([1, 2, 6], [0, 0, 0]).advantages
    with_nan = advantages([1, NAN, 2, 6], [0, 0, 0, 0]).advantages
    np.testing.assert_array_equal(with_nan, [scored[0], 0, scored[1], scored[2]])


@pytest.mark.parametrize("n", [0, 1])
def test_tiny_batches(n):
    for scale in ("group", "batch", "none"):
        assert advantages([2.0] * n, [0] * n, scale).advantages.tolist() == [0.0] * n


def test_unknown_scale():
    with pytest.raises(ValueError, match="gdpo"):
        advantages([1, 2], [0, 0], "gdpo")


finite = st.floats(-100, 100, width=32)


@settings(deadline=None)
@given(st.data())
def test_any_order_any_group_sizes_against_statistics_and_torch(data):
    groups = data.draw(st.lists(st.integers(-3, 3), min_size=2, max_size=40))
    rewards = data.draw(st.lists(finite | st.just(NAN), min_size=len(groups), max_size=len(groups)))
    order = data.draw(st.permutations(range(len(groups))))
    scored = [r for r in rewards if not math.isnan(r)]
    batch_std = torch.tensor(scored, dtype=torch.float64).std().item() if len(scored) > 1 else 0.0
    for scale in ("group", "batch", "none"):
        result = advantages(rewards, groups, scale)
        # another order: the same bits
        shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order], scale)
        np.testing.assert_array_equal(shuffled.advantages, result.advantages[list(order)])
        assert shuffled[1:] == result[1:]
        for group in set(groups):
            members = [i for i, g in enumerate(groups) if g == group and not math.isnan(rewards[i])]
            if len(members) < 2:
                assert not result.advantages[members].any()
                continue
            values = [rewards[i] for i in members]
            scaler = {"group": statistics.stdev(values), "batch": batch_std}.get(scale)
            scaler = 1.0 if scaler is None else scaler + STD_EPSILON
            expected = [(v - statistics.mean(values)) / scaler for v in values]
            np.testing.assert_allclose(result.advantages[members], expected, rtol=1e-5, atol=1e-5)


def test_combine_rewards_by_hand():
    rewards = np.array([[1, 2], [1, NAN], [NAN, 2], [NAN, NAN], [0, 0]], np.float32)
    np.testing.assert_array_equal(combine_rewards(rewards, [0.5, 2.0]), f32(4.5, 0.5, 4.0, NAN, 0.0))
    assert combine_rewards(rewards, [0.5, 2.0]).dtype == np.float32


def test_combine_rewards_refuses_another_number_of_weights():
    with pytest.raises(ValueError, match="1 reward weights"):
        combine_rewards(np.zeros((3, 2), np.float32), [1.0])


@settings(deadline=None)
@given(st.lists(finite, min_size=3, max_size=3), st.integers(2, 9))
def test_equal_rows_of_rewards_have_equal_sums(row, n):
    total = combine_rewards(np.array([row] * n, np.float32), [0.1, 0.7, 1.3])
    assert len(set(total.tolist())) == 1
    assert advantages(total, [0] * n).zero_std_groups == 1


def test_mean_standard_deviation_of_groups():
    """Group 0: rewards 1 and 0, unbiased std sqrt(1/2); group 1: equal rewards; group 2: a single scored one."""
    rewards = np.array([1, 1, 0, 1, 5, np.nan], np.float32)
    result = group_advantages(rewards, np.array([0, 1, 0, 1, 2, 2]), "group")
    assert result.mean_std == pytest.approx(0.5**0.5 / 3)
    assert (result.num_groups, result.zero_std_groups) == (3, 2)
