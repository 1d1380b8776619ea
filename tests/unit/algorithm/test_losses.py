"""Losses against hand-worked numbers, the formulas written as loops, exact expectations, and finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithm import losses
from megatron_grpo.algorithm.kl import kl_k3
from megatron_grpo.algorithm.losses import clipped_loss

# Of numbers in float64: the default, 1e-7, would hide a rounding to float32.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

EPSILON, EPSILON_HIGH = 0.2, 0.3


def tensor(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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
def test_clipped_loss_by_hand(ratio, advantage, loss, slope, low, high):
    log_ratio = tensor(math.log(ratio)).requires_grad_()
    value = clipped_loss(log_ratio, tensor(advantage), EPSILON, EPSILON_HIGH)
    value.loss.sum().backward()
    assert value.loss.item() == pytest.approx(loss, abs=1e-12)
    assert log_ratio.grad.item() == pytest.approx(slope, abs=1e-12)
    assert (value.clip_low.item(), value.clip_high.item()) == (low, high)


@settings(deadline=None)
@given(difference=st.floats(-3, 3), advantage=st.floats(-5, 5), low=st.floats(0.01, 0.9), high=st.floats(0.01, 5))
def test_clipped_loss_is_ppos_other_form(difference, advantage, low, high):
    """min(rho A, clip(rho) A) = min(rho A, g(A)), g(A) = (1 + high) A for A >= 0, (1 - low) A below (Achiam 2018)."""
    edge = 1 + high if advantage >= 0 else 1 - low
    assume(abs(math.exp(difference) - edge) > 1e-9)  # at the edge itself rounding decides
    bound = edge * advantage
    expected = -min(math.exp(difference) * advantage, bound)
    value = clipped_loss(tensor(difference), tensor(advantage), low, high)
    assert value.loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    clipped = value.clip_low + value.clip_high
    beyond = math.exp(difference) > edge if advantage > 0 else math.exp(difference) < edge
    assert bool(clipped.item()) == (advantage != 0 and beyond)


@settings(deadline=None)
@given(difference=st.floats(-3, 3), advantage=st.floats(-5, 5), bound=st.floats(1.31, 9))
def test_dual_clip_bounds_the_objective(difference, advantage, bound):
    """Dual clip as its paper has it: max(PPO's objective, c A) where A < 0."""
    objective = -clipped_loss(tensor(difference), tensor(advantage), EPSILON, EPSILON_HIGH).loss.item()
    expected = max(objective, bound * advantage) if advantage < 0 else objective
    value = clipped_loss(tensor(difference), tensor(advantage), EPSILON, EPSILON_HIGH, bound)
    assert -value.loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_at_the_old_policy_the_gradient_is_reinforce():
    log_probs = tensor(-0.3, -2.0, -7.0).requires_grad_()
    advantages = tensor(0.5, -1.5, 0.0)
    value = clipped_loss(log_probs - log_probs.detach(), advantages, EPSILON, EPSILON)
    value.loss.sum().backward()
    torch.testing.assert_close(value.loss.detach(), -advantages, **EXACT)  # rho = 1
    torch.testing.assert_close(log_probs.grad, -advantages, **EXACT)
    assert not value.clip_low.any() and not value.clip_high.any()


# ---- every loss against its formula as a loop over tokens, on two interleaved completions

COMPLETION = [3, 3, 3, 0, 0, 0, 0, 1]
D = [0.31, -0.27, 0.05, -0.6, 0.9, 0.2, -0.1, -0.45]
A = [1.5, 1.5, 1.5, -0.7, -0.7, -0.7, -0.7, 0.4]
LP = [-1.0, -0.2, -3.0, -2.0, -0.5, -1.5, -0.9, -2.5]


def members(t):
    return [k for k in range(len(D)) if COMPLETION[k] == COMPLETION[t]]


def mean_d(t, d=D):
    return sum(d[k] for k in members(t)) / len(members(t))


def clip(x, low, high):
    return min(max(x, low), high)


def grpo(d, a, low=0.2, high=0.3):
    rho = math.exp(d)
    return -min(rho * a, clip(rho, 1 - low, 1 + high) * a)


def gmpo(t):
    sign = 1 if A[t] > 0 else -1
    bounded = [sign * min(sign * d, sign * clip(d, -0.2, 0.3)) for d in D]
    return -A[t] * math.exp(mean_d(t, bounded))


def fipo(t):
    gamma = 2 ** (-1 / 2)
    future = sum(gamma ** (k - t) * D[k] for k in members(t) if k >= t and math.exp(D[k]) <= 2)
    unsafe = A[t] < 0 and math.exp(D[t]) > 1.15
    return clip(math.exp(future), 0.8 if unsafe else 1.0, 1.0 if unsafe else 1.2)


def sapo(t):
    tau = 1.0 if A[t] > 0 else 1.05
    return -4 / tau / (1 + math.exp(-tau * (math.exp(D[t]) - 1))) * A[t]


FORMULAS = {  # ours of (log_probs, old_log_probs, advantages, completion), the loop's of a token
    "grpo": (
        lambda lp, old, a, c: clipped_loss(losses.log_ratio(lp, old, c, "token"), a, 0.2, 0.3).loss,
        lambda t: grpo(D[t], A[t]),
    ),
    "gspo": (
        lambda lp, old, a, c: clipped_loss(losses.log_ratio(lp, old, c, "sequence"), a, 0.02, 0.03).loss,
        lambda t: grpo(mean_d(t), A[t], 0.02, 0.03),
    ),
    "sequence_token": (
        lambda lp, old, a, c: clipped_loss(losses.log_ratio(lp, old, c, "sequence_token"), a, 0.02, 0.03).loss,
        lambda t: grpo(mean_d(t), A[t], 0.02, 0.03),
    ),
    "cispo": (
        lambda lp, old, a, c: losses.cispo_loss(lp, lp - old, a, 1.2).loss,
        lambda t: -min(math.exp(D[t]), 1.2) * A[t] * LP[t],
    ),
    "sapo": (lambda lp, old, a, c: losses.sapo_loss(lp - old, a, 1.0, 1.05).loss, sapo),
    "gmpo": (lambda lp, old, a, c: losses.gmpo_loss(lp - old, a, c, 0.2, 0.3).loss, gmpo),
    "fipo": (lambda lp, old, a, c: losses.fipo_weights(lp - old, a, c, 2.0, 0.2, 1.15, 2.0), fipo),
    "reinforce": (lambda lp, old, a, c: losses.reinforce_loss(lp, a).loss, lambda t: -A[t] * LP[t]),
}


def inputs():
    log_probs = tensor(*LP)
    return log_probs.requires_grad_(), log_probs.detach() - tensor(*D), tensor(*A), torch.tensor(COMPLETION)


@pytest.mark.parametrize("name", FORMULAS)
def test_value_is_the_formulas(name):
    ours, formula = FORMULAS[name]
    expected = tensor(*[formula(t) for t in range(len(D))])
    torch.testing.assert_close(ours(*inputs()).detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "gmpo", "reinforce"])
def test_gradient_is_that_of_finite_differences(name):
    log_probs, *rest = inputs()
    assert torch.autograd.gradcheck(lambda lp: FORMULAS[name][0](lp, *rest), log_probs)


def test_gradients_with_a_stop():
    """Where the formula stops gradients, worked by hand: cispo -min(rho, 1.2) A; sequence_token -rho_i A or 0 where
    the completion is clipped; none for fipo's weight.
    """
    log_probs, *rest = inputs()
    (cispo,) = torch.autograd.grad(FORMULAS["cispo"][0](log_probs, *rest).sum(), log_probs)
    torch.testing.assert_close(cispo, tensor(*[-min(math.exp(d), 1.2) * a for d, a in zip(D, A, strict=True)]), **EXACT)
    (token,) = torch.autograd.grad(FORMULAS["sequence_token"][0](log_probs, *rest).sum(), log_probs)
    slopes = []
    for t, a in enumerate(A):
        rho = math.exp(mean_d(t))
        slopes.append(0.0 if (a > 0 and rho > 1.03) or (a < 0 and rho < 0.98) else -rho * a)
    torch.testing.assert_close(token, tensor(*slopes), **EXACT)
    assert not FORMULAS["fipo"][0](log_probs, *rest).requires_grad


def test_gspo_and_its_token_form_have_one_gradient():
    """With one advantage per completion they agree, added up over the completion (GSPO, section 4.3)."""
    log_probs, *rest = inputs()
    gspo, token = (
        torch.autograd.grad(FORMULAS[name][0](log_probs, *rest).sum(), log_probs)[0]
        for name in ("gspo", "sequence_token")
    )
    for i in (3, 0, 1):
        own = torch.tensor(COMPLETION) == i
        torch.testing.assert_close(gspo[own].sum(), token[own].sum(), **EXACT)


@pytest.mark.parametrize(
    ("name", "clip_low", "clip_high"),
    [("gmpo", [0, 0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]), ("cispo", [0] * 8, [1, 0, 0, 0, 1, 1, 0, 0])],
)
def test_which_tokens_are_clipped(name, clip_low, clip_high):
    log_probs, old, a, c = inputs()
    d = log_probs - old
    value = losses.gmpo_loss(d, a, c, 0.2, 0.3) if name == "gmpo" else losses.cispo_loss(log_probs, d, a, 1.2)
    assert (value.clip_low.tolist(), value.clip_high.tolist()) == (clip_low, clip_high)


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4), seed=st.integers(0, 99), half=st.floats(0.5, 64))
def test_fipos_sum_over_the_future(lengths, seed, half):
    completion = np.repeat(np.arange(len(lengths)), lengths)
    d = np.random.default_rng(seed).normal(0, 0.01, len(completion))
    future, expected = 0.0, np.zeros(len(d))
    for t in reversed(range(len(d))):
        last = t + 1 == len(d) or completion[t + 1] != completion[t]
        future = d[t] + (0.0 if last else 2 ** (-1 / half) * future)
        expected[t] = clip(math.exp(future), 1.0, 1.2)
    weights = losses.fipo_weights(
        torch.from_numpy(d), torch.ones(len(d), dtype=torch.float64), torch.from_numpy(completion), half, 0.2, 4.0
    )
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-9)


def test_real_is_the_gradient_of_its_loss():
    """-A_i s_i, averaged over completions, has the gradient of the mean over groups of the classification loss; the
    third group has no negative.
    """
    scores = torch.tensor([0.3, -0.2, 0.5, -0.4, 0.1, 0.2, 0.7], dtype=torch.float64, requires_grad=True)
    signs, groups, tau = np.float32([1, -1, 2, -1, 0, 1, 1]), np.array([7, 7, 7, 2, 2, 2, 9]), 0.5
    total = 0.0
    for group in (7, 2):
        positive = scores[torch.from_numpy((groups == group) & (signs > 0))]
        negative = scores[torch.from_numpy((groups == group) & (signs <= 0))]
        total = total + torch.log(1 + torch.exp(-positive / tau).sum()) + torch.log(1 + torch.exp(negative / tau).sum())
    (gradient,) = torch.autograd.grad(total / 3, scores)
    ours = losses.real_advantages(scores.detach().numpy(), signs, groups, tau)
    np.testing.assert_allclose(-ours / len(ours), gradient.numpy(), rtol=1e-6)
    assert ours[6] == 0 and (ours[[0, 2, 5]] > 0).all() and (ours[[1, 3, 4]] < 0).all()
    assert np.isfinite(losses.real_advantages(np.array([-900.0, 900.0]), np.float32([1, -1]), np.zeros(2), tau)).all()


def test_real_leaves_out_what_nothing_scored():
    """By hand, s = 0 and tau = 1/2: alone on its side a completion is asked for 2 x 1/(1 + 1) = 1, times n / groups.

    The second group has no negative.
    """
    signs, groups = np.float32([1, math.nan, -1, 1, math.nan, 1]), np.array([0, 0, 0, 1, 1, 1])
    assert losses.real_advantages(np.zeros(6), signs, groups, 0.5).tolist() == [3, 0, -3, 0, 0, 0]


def test_dpo_is_the_gradient_of_its_loss():
    """Pairs (2, 1) and (4, 5) of three groups: 0 has no reward, 3 no token in the loss, and 6 and 7 are equally good.

    A_i times the sum of the log-probabilities of completion i, over all tokens, has the gradient of the mean over pairs
    of TRL's -logsigmoid(beta (log-ratio of the better - log-ratio of the worse)).
    """
    s = torch.tensor([0.3, -2.0, 1.5, 9.0, -0.4, 0.1, 0.2, 0.7], dtype=torch.float64, requires_grad=True)
    advantages = np.float32([math.nan, -1, 1, 2, 3, 2.5, 1, 1])
    lengths, groups, beta = np.array([5, 3, 7, 0, 2, 2, 4, 4]), np.array([7, 7, 7, 7, 2, 2, 9, 9]), 0.4
    margins = beta * torch.stack([s[2] - s[1], s[4] - s[5]])
    total = -torch.nn.functional.logsigmoid(margins).mean()
    (gradient,) = torch.autograd.grad(total, s)
    inputs = s.detach().numpy(), advantages, lengths, groups, beta
    ours = losses.dpo_advantages(*inputs)
    np.testing.assert_allclose(-ours / lengths.sum(), gradient.numpy(), rtol=1e-6)
    metrics = losses.dpo_metrics(*inputs)
    margin = margins.mean().item()
    assert metrics == {
        "dpo/pairs": 2,
        "dpo/loss": pytest.approx(total.item()),
        "dpo/margin": pytest.approx(margin),
        "dpo/accuracy": 0.5,
    }
    assert np.isfinite(losses.dpo_advantages(900.0 * inputs[0], *inputs[1:])).all()
    nobody = losses.dpo_advantages(*(values[6:] for values in inputs[:4]), beta)
    assert not nobody.any() and losses.dpo_metrics(*(values[6:] for values in inputs[:4]), beta) == {"dpo/pairs": 0}


def test_a_broken_token_gives_no_nan():
    log_probs = torch.tensor([0.0, 0.0], requires_grad=True)
    advantages, zero = torch.tensor([1.0, -1.0]), torch.tensor([0, 1])
    d = log_probs - torch.tensor([-500.0, -500.0])
    total = kl_k3(log_probs, torch.tensor([500.0, -500.0]))
    for loss in (
        clipped_loss(d, advantages, EPSILON, EPSILON),
        losses.sapo_loss(d, advantages, 1.0, 1.05),
        losses.gmpo_loss(d, advantages, zero, EPSILON, EPSILON),
        losses.cispo_loss(log_probs, d, advantages, 5.0),
    ):
        total = total + loss.loss * losses.fipo_weights(d, advantages, zero, 32.0, 0.2, 4.0)
    total.sum().backward()
    assert torch.isfinite(total).all() and torch.isfinite(log_probs.grad).all()
