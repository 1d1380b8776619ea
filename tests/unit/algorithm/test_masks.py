"""Masks of an update against numbers worked by hand and the definitions as loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithm import masks


def test_top_entropy_by_hand():
    entropies = np.float32([0.1, 2.0, 0.5, 1.0, 1.5])
    # the 0.6 quantile of 0.1 0.5 1.0 1.5 2.0 lies at index 2.4: 1.2
    assert masks.top_entropy(entropies, 0.4).tolist() == [False, True, False, False, True]
    assert masks.top_entropy(entropies, 1.0).all()
    torch_threshold = torch.quantile(torch.from_numpy(entropies), 0.7)
    assert masks.top_entropy(entropies, 0.3).tolist() == (entropies >= torch_threshold.item()).tolist()


def test_covariances_by_hand():
    # means 1 and -2
    for completion in (np.array([0, 0]), np.array([3, 1])):
        first = masks.covariances(np.array([3.0, -1.0]), np.array([-1.0, -3.0]), completion)
        second = masks.covariances(np.array([3.0, -1.0]), np.array([-3.0, -1.0]), completion)
        np.testing.assert_allclose([first, second], [[2.0, 2.0], [-2.0, -2.0]])


def test_clip_cov_by_hand():
    covariances, draws = np.array([0.5, 2.0, 3.0, 9.0, 4.0, 1.0]), np.array([0.0, 0.9, 0.2, 0.1, 0.3, 0.0])
    # between 1 and 5 lie the numbers 1, 2 and 4; of these 2 and 4 have the smallest draws
    assert masks.clip_cov(covariances, 0.34, 1, 5, draws).tolist() == [True, True, False, True, False, True]
    assert masks.clip_cov(covariances, 1e-4, 1, 5, draws).tolist() == [True, True, False, True, True, True]
    assert masks.clip_cov(covariances, 1.0, 1, 5, draws).sum() == 3
    assert masks.clip_cov(covariances, 1.0, 10, 20, draws).all()


def test_kl_cov_by_hand():
    covariances = np.array([0.5, 2.0, -3.0, 9.0, 4.0])
    assert masks.kl_cov(covariances, 0.4).tolist() == [False, False, False, True, True]
    assert masks.kl_cov(covariances, 2e-4).tolist() == [False, False, False, True, False]
    assert masks.kl_cov(np.array([1.0, 3.0, 3.0, 3.0]), 0.5).tolist() == [False, True, True, False]


def test_second_moment_by_hand():
    differences = np.float32([0.1, -0.5, 0.2, 0.0])
    # squares 0.01 0.25 0.04 0: all 0.075; without 0.25 0.0167
    completion = np.array([0, 0, 1, 2])
    assert masks.second_moment(differences, 0.04, completion).tolist() == [True, False, True, True]
    assert masks.second_moment(differences, 0.08, completion).all()
    assert not masks.second_moment(np.float32([1.0, 2.0]), 0.04, np.array([0, 1])).any()
    # squares 0 1 1 1: without the last 0.67, without two 0.5
    assert masks.second_moment(np.array([1.0, -1.0, 0.0, 1.0]), 0.6, completion).tolist() == [True, False, True, False]


@settings(deadline=None)
@given(values=st.lists(st.floats(-3, 3), min_size=1, max_size=20), threshold=st.floats(0.01, 4))
def test_second_moment_drops_one_after_the_other(values, threshold):
    kept = list(range(len(values)))
    while kept and not sum(values[k] ** 2 for k in kept) / len(kept) < threshold - 1e-12:
        kept.remove(max(kept, key=lambda k: (values[k] ** 2, k)))
    found = masks.second_moment(np.array(values), threshold, np.arange(len(values)) // 3)
    assert np.isclose(sum(np.array(values)[found] ** 2), sum(values[k] ** 2 for k in kept)) or found.sum() != len(kept)
    assert abs(int(found.sum()) - len(kept)) <= 1  # where the mean is the threshold but for rounding


@settings(deadline=None)
@given(
    st.lists(st.floats(-3, 3), min_size=1, max_size=30),
    st.lists(st.integers(0, 3), min_size=30, max_size=30),
    st.sampled_from([0.01, 0.3, 0.5, 1.0]),
)
def test_reductions_are_the_definitions_and_do_not_depend_on_the_order_of_completions(values, owners, share):
    values, completion = np.array(values), np.array(owners[: len(values)])
    order = np.concatenate([np.flatnonzero(completion == owner) for owner in (2, 0, 3, 1)])
    total = masks.sum_by_completion(values, completion)
    assert np.isclose(total, values.sum(), rtol=0, atol=1e-12)
    assert masks.sum_by_completion(values[order], completion[order]) == total
    centred = values - values.mean()
    np.testing.assert_allclose(masks.covariances(values, -values, completion), -(centred**2), rtol=0, atol=1e-12)
    quantile = np.quantile(values, 1 - share)
    away = np.abs(values - quantile) > 1e-12
    assert (masks.top_entropy(values, share) == (values >= quantile))[away].all()
    chosen = np.zeros(len(values), bool)
    chosen[np.argsort(values, kind="stable")[: int(share * len(values))]] = True
    assert masks.smallest(values, int(share * len(values))).tolist() == chosen.tolist()


def test_off_policy_sequences_by_hand():
    completion = torch.tensor([4, 4, 0, 0, 2])
    rollout, log_probs = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.5, -2.5, -3.0, -1.0, -1.5])
    log_probs.requires_grad_()
    # means of rollout - policy: 1, 1, 0.5
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0])
    mask = masks.off_policy_sequences(log_probs, rollout, advantages, completion, 0.9)
    assert mask.tolist() == [0, 0, 1, 1, 1] and not mask.requires_grad
    assert masks.off_policy_sequences(log_probs, rollout, advantages, completion, 0.4).tolist() == [0, 0, 1, 1, 0]


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_the_threshold_is_of_the_whole_update(share):
    """Split into two micro-batches of different entropy, each with a threshold of its own, it would be another."""
    rng = np.random.default_rng(0)
    entropies = np.concatenate([rng.random(50), 1 + rng.random(50)])
    assert masks.top_entropy(entropies, share)[:50].sum() == 0
