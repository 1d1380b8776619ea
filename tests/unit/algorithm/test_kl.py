"""KL estimators against hand-worked numbers, finite differences, and exact expectations over a small vocabulary."""

import math

import numpy as np
import pytest
import torch

from megatron_grpo.algorithm.distillation import on_policy_distillation
from megatron_grpo.algorithm.kl import KL_ESTIMATORS, kl_k3, kl_penalties, kl_term

# Of numbers in float64: the default, 1e-7, would hide a rounding to float32.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def tensor(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def term(estimator, log_probs, reference, old=None):
    return kl_term(estimator, log_probs, reference, log_probs.detach() if old is None else old)


@pytest.mark.parametrize(
    ("estimator", "x", "value"),
    [
        ("k1", -1.5, -1.5),
        ("k2", 3.0, 4.5),
        ("k2", -3.0, 4.5),
        ("k3", 0.0, 0.0),
        ("k3", 1.0, math.exp(-1)),
        ("k3", -1.0, math.e - 2),
        ("k3", math.log(2), math.log(2) - 0.5),
        ("unbiased", math.log(2), math.log(2) - 0.5),  # on-policy the ratio is 1
    ],
)
def test_values_by_hand(estimator, x, value):
    assert term(estimator, tensor(x), tensor(0)).item() == pytest.approx(value, abs=1e-15)


def test_unbiased_weighs_by_the_ratio_to_the_old_policy():
    """Twice as likely as when it was sampled, half as likely as under the reference: 2 (2 - 1 - log 2)."""
    value = kl_term("unbiased", tensor(0.0), tensor(math.log(2)), tensor(-math.log(2)))
    assert value.item() == pytest.approx(2 * (1 - math.log(2)))


def test_an_unknown_estimator():
    with pytest.raises(ValueError, match="k4"):
        term("k4", tensor(0), tensor(0))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_gradients_are_those_of_finite_differences(estimator):
    torch.manual_seed(0)
    log_probs = -torch.rand(14, dtype=torch.float64)
    reference, old = (log_probs + 0.4 * torch.randn(14, dtype=torch.float64) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x: kl_term(estimator, x, reference, old), log_probs.requires_grad_())


def test_k3_is_clamped():
    expected = tensor(math.exp(20) - 21, math.exp(-20) + 19)
    torch.testing.assert_close(kl_k3(tensor(-50.0, 50.0), tensor(0.0, 0.0)), expected, **EXACT)


def test_a_broken_token_gives_no_nan():
    log_probs = torch.tensor([0.0, -500.0], requires_grad=True)
    other = torch.tensor([-500.0, 0.0])
    total = sum(kl_term(estimator, log_probs, other, other) for estimator in KL_ESTIMATORS)
    total.sum().backward()
    assert torch.isfinite(total).all() and torch.isfinite(log_probs.grad).all()


def test_k3_keeps_its_digits_in_float32_where_the_policies_nearly_agree():
    x = torch.tensor([1e-3, -1e-3, 1e-4], dtype=torch.float32)
    exact = [float(v) ** 2 / 2 - float(v) ** 3 / 6 for v in x.double()]
    for value, expected in zip(kl_k3(x, torch.zeros(3)).tolist(), exact, strict=True):
        assert value == pytest.approx(expected, rel=1e-3)  # exp(-x) - 1 + x in float32 is off by 100%


# ---- exact expectations over a vocabulary of five tokens

VOCABULARY = 5


def policies():
    """(logits, log-probabilities that they give, those of the reference, those of an old policy)."""
    torch.manual_seed(1)
    logits = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)
    reference, old = (torch.randn(VOCABULARY, dtype=torch.float64).log_softmax(0) for _ in range(2))
    return logits, logits.log_softmax(0), reference, old


def gradient(value, logits):
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def divergence(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3", "unbiased"])
def test_the_mean_is_the_divergence(estimator):
    _, log_p, log_q, _ = policies()
    torch.testing.assert_close((log_p.exp() * term(estimator, log_p, log_q)).sum(), divergence(log_p, log_q), **EXACT)


def test_unbiased_has_the_mean_of_the_divergence_though_an_old_policy_sampled():
    _, log_p, log_q, log_old = policies()
    mean = (log_old.exp() * kl_term("unbiased", log_p, log_q, log_old)).sum()
    torch.testing.assert_close(mean, divergence(log_p, log_q), **EXACT)


def test_what_the_mean_gradients_are_as_a_loss():
    """Tokens are samples: their probabilities are held fixed. k2 and unbiased follow KL(policy || reference), k3 the
    other divergence, whose gradient by the logits is p - q, and k1 nothing.
    """
    logits, log_p, log_q, log_old = policies()
    p = log_p.exp().detach()
    mean = {name: gradient((p * term(name, log_p, log_q)).sum(), logits) for name in KL_ESTIMATORS}
    wanted = gradient(divergence(log_p, log_q), logits)
    torch.testing.assert_close(mean["k2"], wanted, **EXACT)
    torch.testing.assert_close(mean["unbiased"], wanted, **EXACT)
    torch.testing.assert_close(mean["k3"], p - log_q.exp(), **EXACT)
    torch.testing.assert_close(mean["k1"], torch.zeros_like(p), **EXACT)
    # With another policy's samples unbiased is still right, and k2 is not.
    off_policy = (log_old.exp() * kl_term("unbiased", log_p, log_q, log_old)).sum()
    torch.testing.assert_close(gradient(off_policy, logits), wanted, **EXACT)
    k2 = gradient((log_old.exp() * kl_term("k2", log_p, log_q, log_old)).sum(), logits)
    assert (k2 - wanted).abs().max() > 0.01


def test_in_the_reward_k1_alone_has_the_gradient_of_the_divergence():
    """-penalty as a reward: the loss's mean gradient is sum of p penalty d log p."""
    logits, log_p, log_q, _ = policies()
    p, everywhere = log_p.exp().detach(), np.ones(VOCABULARY, np.uint8)
    penalties = kl_penalties(log_p.detach().numpy(), log_q.numpy(), everywhere, 0.3)
    wanted = 0.3 * gradient(divergence(log_p, log_q), logits)
    torch.testing.assert_close(gradient((p * torch.from_numpy(penalties) * log_p).sum(), logits), wanted, **EXACT)
    k3 = 0.3 * kl_k3(log_p, log_q).detach()
    assert (gradient((p * k3 * log_p).sum(), logits) - wanted).abs().max() > 0.01


def test_penalties_by_hand():
    old, reference = np.float32([np.nan, -1, -3, -2]), np.float32([np.nan, -2, -1, -2])
    mask = np.array([0, 1, 1, 1], np.uint8)
    np.testing.assert_array_equal(kl_penalties(old, reference, mask, 0.5), [0, 0.5, -1, 0])
    # Not finite on a token in the loss, one or both: the loss is to be NaN.
    old[3] = reference[1] = -np.inf
    found = kl_penalties(old, reference, np.ones(4, np.uint8), 0.5)
    np.testing.assert_array_equal(found, [np.nan, np.nan, -1, np.nan])


def test_on_policy_distillation_by_hand():
    """-0.5 + 2 (-1 - -3) = 3.5: the teacher finds it likelier; 0.25 + 2 (-4 - -1) = -5.75."""
    advantages, mask = np.float32([9, -0.5, 0.25]), np.array([0, 1, 1], np.uint8)
    teacher, old = np.float32([np.nan, -1, -4]), np.float32([np.nan, -3, -1])
    result = on_policy_distillation(advantages, teacher, old, mask, 2.0)
    assert result.tolist() == [0, 3.5, -5.75] and result.dtype == np.float32
    teacher[2] = old[2] = -np.inf
    result = on_policy_distillation(advantages, teacher, old, np.ones(3, np.uint8), 2.0)
    np.testing.assert_array_equal(result, [np.nan, 3.5, np.nan])


def test_distillation_follows_the_divergence_from_the_teacher():
    """Exactly, over a vocabulary: the mean of -A d log p is C times the gradient of KL(policy || teacher)."""
    logits, log_p, log_teacher, _ = policies()
    zeros, everywhere = np.zeros(VOCABULARY, np.float32), np.ones(VOCABULARY, np.uint8)
    policy = log_p.detach().numpy()
    a = on_policy_distillation(zeros, log_teacher.numpy(), policy, everywhere, 0.7)
    ours = gradient(-(log_p.exp().detach() * torch.from_numpy(a) * log_p).sum(), logits)
    torch.testing.assert_close(ours, 0.7 * gradient(divergence(log_p, log_teacher), logits), rtol=1e-6, atol=1e-7)
