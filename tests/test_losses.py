"""Losses against hand-worked numbers, PPO's other form of the clip, exact expectations, and finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithm.losses import kl_k3, policy_loss

EPSILON, EPSILON_HIGH = 0.2, 0.3


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "low", "high"),
    [  # worked by hand from -min(rho A, clip(rho, 0.8, 1.3) A); slope = d loss / d log_prob = -rho A, or 0 when clipped
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.0, -2.0, 2.0, 2.0, 0, 0),
        (1.5, 1.0, -1.3, 0.0, 0, 1),  # went up enough
        (1.5, -1.0, 1.5, 1.5, 0, 0),  # went the wrong way: not clipped
        (0.5, -1.0, 0.8, 0.0, 1, 0),  # went down enough
        (0.5, 1.0, -0.5, -0.5, 0, 0),  # went the wrong way: not clipped
        (1.25, 4.0, -5.0, -5.0, 0, 0),  # inside, though above 1 + epsilon
        (0.1, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, loss, slope, low, high):
    log_probs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0 - math.log(ratio)], dtype=torch.float64)
    value, stats = policy_loss(log_probs, old, torch.tensor([advantage], dtype=torch.float64), EPSILON, EPSILON_HIGH)
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-12)
    assert log_probs.grad.item() == pytest.approx(slope, abs=1e-12)
    assert (stats["clip_low"].item(), stats["clip_high"].item()) == (low, high)


@settings(deadline=None)
@given(
    difference=st.floats(-3, 3),
    advantage=st.floats(-5, 5),
    low=st.floats(0.01, 0.9),
    high=st.floats(0.01, 5),
)
def test_policy_loss_is_ppos_other_form(difference, advantage, low, high):
    """min(rho A, clip(rho) A) = min(rho A, g(A)), g(A) = (1 + high) A for A >= 0, (1 - low) A below (Achiam 2018)."""
    bound = (1 + high) * advantage if advantage >= 0 else (1 - low) * advantage
    expected = -min(math.exp(difference) * advantage, bound)
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (difference, 0.0, advantage)]
    loss, stats = policy_loss(*tensors, low, high)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    clipped = stats["clip_low"] + stats["clip_high"]
    assert bool(clipped.item()) == (advantage != 0 and math.exp(difference) * advantage > bound)


def test_without_old_log_probs_the_gradient_is_reinforce():
    log_probs = torch.tensor([-0.3, -2.0, -7.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, -1.5, 0.0], dtype=torch.float64)
    loss, stats = policy_loss(log_probs, None, advantages, EPSILON, EPSILON)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), -advantages)  # rho = 1
    torch.testing.assert_close(log_probs.grad, -advantages)
    assert not stats["clip_low"].any() and not stats["clip_high"].any()


def test_none_is_the_same_as_the_policys_own_log_probs():
    log_probs = torch.randn(50, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(50, dtype=torch.float64)
    gradients = []
    for old in (None, log_probs.detach().clone()):
        loss, _ = policy_loss(log_probs, old, advantages, EPSILON, EPSILON)
        gradients.append(torch.autograd.grad(loss.sum(), log_probs)[0])
    assert torch.equal(*gradients)


def test_policy_loss_gradient_against_finite_differences():
    torch.manual_seed(0)
    ratio = torch.tensor([0.5, 0.7, 0.9, 1.1, 1.25, 1.4, 2.0], dtype=torch.float64)  # away from the kinks 0.8 and 1.3
    old = -torch.rand(14, dtype=torch.float64)
    log_probs = (old + ratio.log().repeat(2)).requires_grad_()
    advantages = torch.cat([torch.full((7,), 1.7), torch.full((7,), -0.6)]).double()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantages, EPSILON, EPSILON_HIGH)[0], log_probs)
    kl_ref = old + 0.4 * torch.randn(14, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_k3(x, kl_ref), log_probs)


def test_a_broken_token_gives_no_nan():
    log_probs = torch.tensor([0.0, 0.0], requires_grad=True)
    loss, _ = policy_loss(log_probs, torch.tensor([-500.0, -500.0]), torch.tensor([1.0, -1.0]), EPSILON, EPSILON)
    (loss + kl_k3(log_probs, torch.tensor([500.0, -500.0]))).sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize(
    ("x", "k3"), [(0.0, 0.0), (1.0, math.exp(-1)), (-1.0, math.e - 2), (math.log(2), math.log(2) - 0.5)]
)
def test_k3_by_hand(x, k3):
    value = kl_k3(torch.tensor([x], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert value.item() == pytest.approx(k3, abs=1e-15)


def test_k3_is_clamped():
    log_probs = torch.tensor([-50.0, 50.0], dtype=torch.float64)
    expected = torch.tensor([math.exp(20) - 21, math.exp(-20) + 19], dtype=torch.float64)
    torch.testing.assert_close(kl_k3(log_probs, torch.zeros(2, dtype=torch.float64)), expected)


def test_mean_of_k3_is_the_divergence_and_mean_of_its_gradient_that_of_the_other_one():
    """Exact expectations over a vocabulary of four tokens."""
    torch.manual_seed(1)
    logits = torch.randn(4, dtype=torch.float64, requires_grad=True)
    log_p, log_q = logits.log_softmax(0), torch.randn(4, dtype=torch.float64).log_softmax(0)
    p, q = log_p.exp().detach(), log_q.exp()
    k3 = kl_k3(log_p, log_q)
    torch.testing.assert_close((p * k3).sum(), (p * (log_p - log_q)).sum())
    (gradient,) = torch.autograd.grad((p * k3).sum(), logits)  # p held fixed: the tokens are samples
    torch.testing.assert_close(gradient, p - q)  # d KL(q || p) / d logits = p - q


def test_k3_keeps_its_digits_in_float32_where_the_policies_nearly_agree():
    x = torch.tensor([1e-3, -1e-3, 1e-4], dtype=torch.float32)
    exact = [float(v) ** 2 / 2 - float(v) ** 3 / 6 for v in x.double()]
    for value, expected in zip(kl_k3(x, torch.zeros(3)).tolist(), exact, strict=True):
        assert value == pytest.approx(expected, rel=1e-3)  # exp(-x) - 1 + x in float32 is off by 100%
