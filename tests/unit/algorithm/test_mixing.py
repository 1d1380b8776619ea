"""Demonstrations beside a rollout: losses, the schedule of mu, token weights and joint advantages, by loops by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_grpo.algorithm.losses import chord_loss, luffy_loss, sft_loss
from megatron_grpo.algorithm.mixing import mu, with_token_weights
from megatron_grpo.algorithm.rollout_advantages import estimate_joint_advantages
from megatron_grpo.data.batch import FinishReason, RolloutBatch

LOG_PROBS = [-1e-6, -0.1, -0.7, -2.3, -9.0, -40.0]
ADVANTAGES = [1.5, -0.5, 0.25, 1.5, 1.5, 1.5]
GAMMA = 0.1
# Of a token: its loss, and the derivative by its log-probability. phi is a constant (stop-gradient).
FORMULAS = {
    "sft": lambda lp, a: (-lp, -1.0),
    "chord": lambda lp, a: (
        -math.exp(lp) * (1 - math.exp(lp)) * lp,
        -math.exp(lp) * (1 - math.exp(lp)),
    ),
    "luffy": lambda lp, a: (
        -a * math.exp(lp) / (math.exp(lp) + GAMMA),
        -a * GAMMA * math.exp(lp) / (math.exp(lp) + GAMMA) ** 2,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_of_each_token(name):
    log_probs = torch.tensor(LOG_PROBS, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    calls = {"sft": lambda: sft_loss(log_probs), "chord": lambda: chord_loss(log_probs)}
    loss = calls.get(name, lambda: luffy_loss(log_probs, advantages, GAMMA))().loss
    loss.sum().backward()
    for token, (lp, a) in enumerate(zip(LOG_PROBS, ADVANTAGES, strict=True)):
        value, derivative = FORMULAS[name](lp, a)
        assert loss[token].item() == pytest.approx(value, rel=1e-12, abs=1e-300)
        assert log_probs.grad[token].item() == pytest.approx(derivative, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize(
    ("update", "flags", "expected"),
    [
        (0, (0.9, None, None, None), 0.9),  # constant
        (70, (0.9, None, None, None), 0.9),
        (0, (0.9, 0.1, 4, 10), 0.0),
        (1, (0.9, 0.1, 4, 10), 0.225),  # a quarter of the rise
        (4, (0.9, 0.1, 4, 10), 0.9),
        (9, (0.9, 0.1, 4, 10), 0.5),  # half of the cosine
        (14, (0.9, 0.1, 4, 10), 0.1),
        (99, (0.9, 0.1, 4, 10), 0.1),
        (2, (0.6, 0.0, None, 6), 0.45),  # cos(60 degrees) = 1/2
        (3, (0.4, None, 4, None), 0.3),
    ],
)
def test_the_schedule_of_mu(update, flags, expected):
    assert mu(update, *flags) == pytest.approx(expected, abs=1e-12)


def batch_of(lengths, groups=None):
    n = len(lengths)
    return RolloutBatch.from_completions(
        [[3]] * n,
        [[4] * length for length in lengths],
        [None] * n,
        weight_version=0,
        group_ids=range(n) if groups is None else groups,
        row_ids=range(n),
        sample_ids=range(n),
        finish_reasons=[FinishReason.STOP] * n,
    )


def args_of(sft, loss="grpo", **values):
    given = {
        "chord_mu_peak": 0.25,
        "chord_mu_valley": None,
        "chord_mu_warmup_steps": None,
        "chord_mu_decay_steps": None,
    }
    given |= {"loss_type": loss, "sft_loss_type": sft, "micro_batch_size": 2, "max_completion_length": 10}
    return SimpleNamespace(**given | values)


@pytest.mark.parametrize("sft", ["sft", "chord"])
def test_mu_weighs_two_averages(sft):
    """(1 - mu) mean over completions of their means + mu mean over the demonstrated tokens, of any values of tokens."""
    rollout, demonstrations = batch_of([2, 5, 3, 7]), batch_of([4, 1, 6])
    completions = np.array([2, 0])  # 3 and 2 tokens
    rollout, demonstrations = with_token_weights(args_of(sft), rollout, completions, demonstrations, 0)
    of_rollout = {0: [1.0, 2.0], 2: [3.0, 5.0, 10.0]}
    of_demonstrations = [[1.0, 1.0, 4.0, 2.0], [7.0], [0.5] * 6]
    expected = 0.75 * ((1.0 + 2.0) / 2 + (3.0 + 5.0 + 10.0) / 3) / 2 + 0.25 * (8.0 + 7.0 + 3.0) / 11
    loss = sum(rollout.weights[i] * sum(values) for i, values in of_rollout.items())
    loss += sum(w * sum(values) for w, values in zip(demonstrations.weights, of_demonstrations, strict=True))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert rollout.weights[[1, 3]].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("grpo", [1 / 5 / 2, 1 / 5 / 5, 1 / 5 / 3, 1 / 5 / 7, 1 / 5 / 4]),
        ("dapo", [1 / 21] * 5),
        ("dr_grpo", [1 / 50] * 5),
    ],
)
def test_demonstrations_of_a_group_are_completions_of_one_average(loss, expected):
    rollout, demonstrations = with_token_weights(
        args_of("luffy", loss), batch_of([2, 5, 3, 7]), np.arange(4), batch_of([4]), 0
    )
    assert [*rollout.weights, *demonstrations.weights] == pytest.approx(expected, rel=1e-6)


def test_without_demonstrations_mu_weighs_nothing():
    rollout, none = with_token_weights(args_of("sft"), batch_of([2, 4]), np.arange(2), None, 0)
    assert none is None and rollout.weights.tolist() == pytest.approx([1 / 4, 1 / 8])


@pytest.mark.parametrize("reward", [None, 2.0])
def test_joint_advantages_are_of_completions_and_demonstration(reward):
    """LUFFY, eq. 4: rewards minus their mean over their standard deviation, of the group with its demonstration."""
    rewards = np.array([0, 1, 0, 0, 1, 1], np.float32)
    batch, demonstrations = batch_of([1] * 6, [7, 7, 7, 9, 9, 9]), batch_of([2], [7])
    args = SimpleNamespace(luffy_reward=reward, advantage_estimator="grpo", scale_rewards="group")
    batch, demonstrations, metrics = estimate_joint_advantages(args, batch, rewards, demonstrations)
    value = 1.0 if reward is None else reward
    of_group = [0.0, 1.0, 0.0, value]
    mean = sum(of_group) / 4
    std = math.sqrt(sum((r - mean) ** 2 for r in of_group) / 3)
    expected = [(r - mean) / std for r in of_group]
    assert [*batch.advantages[:3], *demonstrations.advantages] == pytest.approx(expected, rel=1e-3)
    of_other = [(r - 2 / 3) / math.sqrt(1 / 3) for r in (0.0, 1.0, 1.0)]  # without a demonstration
    assert batch.advantages[3:].tolist() == pytest.approx(of_other, rel=1e-3)
    assert metrics["advantage/mean"] == pytest.approx(batch.advantages.mean())
