"""Masks of an update against numbers worked by hand and the definitions as loops."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithm import masks


def all_of(values) -> masks.Tokens:
    """The tokens of an update with one completion."""
    return masks.Tokens(np.zeros(len(values), np.int64), 1)


def test_top_entropy_by_hand():
    entropies = np.float32([0.1, 2.0, 0.5, 1.0, 1.5])
    # the 0.6 quantile of 0.1 0.5 1.0 1.5 2.0 lies at index 2.4: 1.2
    assert masks.top_entropy(entropies, 0.4, all_of(entropies)).tolist() == [False, True, False, False, True]
    assert masks.top_entropy(entropies, 1.0, all_of(entropies)).all()
    torch_threshold = torch.quantile(torch.from_numpy(entropies), 0.7)
    assert (
        masks.top_entropy(entropies, 0.3, all_of(entropies)).tolist() == (entropies >= torch_threshold.item()).tolist()
    )


def test_covariances_by_hand():
    # means 1 and -2
    for completion in (np.array([0, 0]), np.array([1, 3])):
        tokens = masks.Tokens(completion, 4)
        first = masks.covariances(np.array([3.0, -1.0]), np.array([-1.0, -3.0]), tokens)
        second = masks.covariances(np.array([3.0, -1.0]), np.array([-3.0, -1.0]), tokens)
        np.testing.assert_allclose([first, second], [[2.0, 2.0], [-2.0, -2.0]])


def test_clip_cov_by_hand():
    covariances, draws = np.array([0.5, 2.0, 3.0, 9.0, 4.0, 1.0]), np.array([0.0, 0.9, 0.2, 0.1, 0.3, 0.0])
    # between 1 and 5 lie the numbers 1, 2 and 4; of these 2 and 4 have the smallest draws
    assert masks.clip_cov(covariances, 0.34, 1, 5, draws, all_of(draws)).tolist() == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
    assert masks.clip_cov(covariances, 1e-4, 1, 5, draws, all_of(draws)).tolist() == [
        True,
        True,
        False,
        True,
        True,
        True,
    ]
    assert masks.clip_cov(covariances, 1.0, 1, 5, draws, all_of(draws)).sum() == 3
    assert masks.clip_cov(covariances, 1.0, 10, 20, draws, all_of(draws)).all()


def test_kl_cov_by_hand():
    covariances = np.array([0.5, 2.0, -3.0, 9.0, 4.0])
    assert masks.kl_cov(covariances, 0.4, all_of(covariances)).tolist() == [False, False, False, True, True]
    assert masks.kl_cov(covariances, 2e-4, all_of(covariances)).tolist() == [False, False, False, True, False]
    assert masks.kl_cov(np.array([1.0, 3.0, 3.0, 3.0]), 0.5, all_of(range(4))).tolist() == [False, True, True, False]


def test_second_moment_by_hand():
    differences = np.float32([0.1, -0.5, 0.2, 0.0])
    # squares 0.01 0.25 0.04 0: all 0.075; without 0.25 0.0167
    tokens = masks.Tokens(np.array([0, 0, 1, 2]), 3)
    assert masks.second_moment(differences, 0.04, tokens).tolist() == [True, False, True, True]
    assert masks.second_moment(differences, 0.08, tokens).all()
    assert not masks.second_moment(np.float32([1.0, 2.0]), 0.04, masks.Tokens(np.array([0, 1]), 2)).any()
    # squares 0 1 1 1: without the last 0.67, without two 0.5
    assert masks.second_moment(np.array([1.0, -1.0, 0.0, 1.0]), 0.6, tokens).tolist() == [True, False, True, False]


@settings(deadline=None)
@given(values=st.lists(st.floats(-3, 3), min_size=1, max_size=20), threshold=st.floats(0.01, 4))
def test_second_moment_drops_one_after_the_other(values, threshold):
    kept = list(range(len(values)))
    while kept and not sum(values[k] ** 2 for k in kept) / len(kept) < threshold - 1e-12:
        kept.remove(max(kept, key=lambda k: (values[k] ** 2, k)))
    found = masks.second_moment(np.array(values), threshold, masks.Tokens(np.arange(len(values)) // 3, 7))
    assert np.isclose(sum(np.array(values)[found] ** 2), sum(values[k] ** 2 for k in kept)) or found.sum() != len(kept)
    assert abs(int(found.sum()) - len(kept)) <= 1  # where the mean is the threshold but for rounding


VALUES = st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=1, max_size=30)  # many are equal


@settings(deadline=None)
@given(VALUES, st.lists(st.integers(0, 3), min_size=30, max_size=30), st.sampled_from([0.01, 0.3, 0.5, 1.0]))
def test_reductions_are_the_definitions(values, owners, share):
    values = np.array(values)
    tokens = masks.Tokens(np.sort(owners[: len(values)]), 4)
    assert np.isclose(tokens.sum(values), values.sum(), rtol=0, atol=1e-12)
    assert tokens.count() == len(values) and tokens.largest(values) == values.max()
    assert [tokens.order_statistic(values, rank) for rank in range(len(values))] == sorted(values)
    centred = values - values.mean()
    np.testing.assert_allclose(masks.covariances(values, -values, tokens), -(centred**2), rtol=0, atol=1e-12)
    quantile = np.quantile(values, 1 - share)
    away = np.abs(values - quantile) > 1e-12
    assert (masks.top_entropy(values, share, tokens) == (values >= quantile))[away].all()
    chosen = np.zeros(len(values), bool)
    chosen[np.argsort(values, kind="stable")[: int(share * len(values))]] = True
    assert tokens.smallest(values, int(share * len(values))).tolist() == chosen.tolist()


@settings(deadline=None, max_examples=10)
@given(VALUES, st.lists(st.integers(0, 3), min_size=30, max_size=30), st.lists(st.sets(st.integers(0, 2)), min_size=4))
def test_shares_of_the_completions_give_the_masks_of_the_whole(values, owners, holders):
    """Three ranks, of which each holds some completions; every completion is held by one or more."""
    values, completion = np.array(values), np.sort(owners[: len(values)])
    draws = np.random.default_rng(0).integers(0, 5, len(values)) / 5

    def all_masks(held, tokens):
        own, random = values[held], draws[held]
        covariances = masks.covariances(own, -own, tokens)
        return [
            covariances,
            masks.top_entropy(own, 0.3, tokens),
            masks.clip_cov(own, 0.3, -2.0, 2.0, random, tokens),
            masks.kl_cov(covariances, 0.4, tokens),
            masks.second_moment(own, 0.8, tokens),
        ]

    whole = all_masks(np.ones(len(values), bool), masks.Tokens(completion, 4))
    barrier, sums = threading.Barrier(3), {}

    def rank(number):
        mine = np.array([number in (who or {0}) for who in holders[:4]])

        def gather(own):
            sums[number] = np.where(mine, own, np.nan)
            barrier.wait()
            result = np.nanmax(list(sums.values()), axis=0)
            barrier.wait()
            return result

        held = mine[completion]
        found = all_masks(held, masks.Tokens(completion[held], 4, gather))
        return [(a.tolist(), b[held].tolist()) for a, b in zip(found, whole, strict=True)]

    with ThreadPoolExecutor(3) as pool:
        for pairs in pool.map(rank, range(3)):
            assert all(found == expected for found, expected in pairs)


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
    assert masks.top_entropy(entropies, share, all_of(entropies))[:50].sum() == 0
