"""Weights against the formulas written as loops, in exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.weighting import token_weights


def weights(loss_type, lengths, micro_batch_size=2, max_completion_length=8):
    aggregation = LOSSES.get(loss_type).aggregation
    return token_weights(aggregation, np.array(lengths, np.int64), micro_batch_size, max_completion_length)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [  # lengths 1, 3, 0, 4: n = 4; 8 tokens; blocks of two with 4 and 4 tokens
        ("grpo", [1 / 4, 1 / 12, 0, 1 / 16]),
        ("dapo", [1 / 8, 1 / 8, 0, 1 / 8]),
        ("dr_grpo", [1 / 32, 1 / 32, 0, 1 / 32]),
        ("bnpo", [1 / 8, 1 / 8, 0, 1 / 8]),
    ],
)
def test_by_hand(loss_type, expected):
    np.testing.assert_allclose(weights(loss_type, [1, 3, 0, 4]), expected, rtol=1e-15)


def test_bnpo_blocks_by_hand():
    # blocks {1, 3}, {0, 0}, {6}: the empty block still counts, the last is short; B = 3
    np.testing.assert_allclose(weights("bnpo", [1, 3, 0, 0, 6]), [1 / 12, 1 / 12, 0, 0, 1 / 18], rtol=1e-15)


@pytest.mark.parametrize(
    ("like", "others"),
    [("grpo", ("gspo", "sapo", "gmpo", "real")), ("dapo", ("cispo", "fipo", "reinforce"))],
)
def test_the_others_average_alike(like, others):
    for loss_type in others:
        np.testing.assert_array_equal(weights(loss_type, [1, 3, 0, 4]), weights(like, [1, 3, 0, 4]))


def test_bnpo_between_grpo_and_dapo():
    """Blocks of one completion are GRPO's average, one block of all is DAPO's."""
    lengths = [5, 2, 9, 1, 1, 30]
    np.testing.assert_allclose(weights("bnpo", lengths, micro_batch_size=1), weights("grpo", lengths))
    np.testing.assert_allclose(weights("bnpo", lengths, micro_batch_size=6), weights("dapo", lengths))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_to_learn_from(loss_type, lengths):
    assert weights(loss_type, lengths).tolist() == [0.0] * len(lengths)


def test_unknown_aggregation():
    with pytest.raises(ValueError, match="ppo"):
        token_weights("ppo", np.array([1]), 1, 1)


def loss_by_definition(loss_type, losses, block_size, max_length):
    """The papers' averages of per-token losses, as nested means in exact arithmetic."""

    def mean(values):
        return sum(values, Fraction(0)) / len(values) if values else Fraction(0)

    if loss_type == "grpo":
        return mean([mean(completion) for completion in losses])
    if loss_type == "dr_grpo":
        return mean([sum(completion, Fraction(0)) / max_length for completion in losses])
    size = len(losses) if loss_type == "dapo" else block_size
    blocks = [losses[i : i + size] for i in range(0, len(losses), size)]
    return mean([mean([token for completion in block for token in completion]) for block in blocks])


@settings(deadline=None)
@given(
    losses=st.lists(st.lists(st.integers(-9, 9).map(Fraction), max_size=7), min_size=1, max_size=12),
    block_size=st.integers(1, 5),
    loss_type=st.sampled_from(["grpo", "bnpo", "dapo", "dr_grpo"]),
)
def test_weighted_sum_is_the_definition(losses, block_size, loss_type):
    w = weights(loss_type, [len(completion) for completion in losses], block_size, 7)
    total = sum(float(w[i]) * float(sum(completion)) for i, completion in enumerate(losses))
    assert total == pytest.approx(float(loss_by_definition(loss_type, losses, block_size, 7)), rel=1e-12, abs=1e-12)
