"""KL penalty of each token against the reference model, in the loss or in the reward.

KL(policy || reference) is the mean of x = log_probs - ref_log_probs over samples of the policy. Training needs the
gradient of the KL; the estimators differ more in their gradients than in their values. On average:

              of each token   value                          gradient of
    k1        x               KL(policy || reference)        nothing (mean zero) in the loss, KL(p || r) in the reward
    k2        x^2 / 2         not a KL divergence            KL(policy || reference)
    k3        exp(-x) - 1 + x KL(policy || reference)        KL(reference || policy)
    unbiased  rho k3          KL(policy || reference)        KL(policy || reference), also for samples of an old policy

Source: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html, names k1, k2 and k3.
"""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_grpo.algorithm.losses import MAX_LOG_RATIO

KLEstimator = Literal["k1", "k2", "k3", "unbiased"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)


def kl_term(estimator: KLEstimator, log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return the KL penalty of each token in the loss, before its weight beta.

        k1 = x,   k2 = x^2 / 2,   k3 = exp(-x) - 1 + x,   unbiased = rho k3,  rho = exp(log_probs - old_log_probs)

    Args:
        estimator: one of KL_ESTIMATORS. k1 is included for completeness: its gradient, d log_probs, has mean zero.
        log_probs: [t], of the sampled tokens under the policy being trained; carries the gradient.
        ref_log_probs: [t], under the reference.
        old_log_probs: [t], under the policy that sampled; read by unbiased, whose gradient also flows through rho:
            rho x d log_probs.

    Returns:
        [t], nats.

    Raises:
        ValueError: unknown `estimator`.

    Source: k3: GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 4); unbiased: DeepSeek-V3.2 (2025, arXiv:2512.02556,
    section 3.1).
    """
    match estimator:
        case "k1":
            return log_probs - ref_log_probs
        case "k2":
            return (log_probs - ref_log_probs).square() / 2
        case "k3":
            return kl_k3(log_probs, ref_log_probs)
        case "unbiased":
            ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            return ratio * kl_k3(log_probs, ref_log_probs)
    raise ValueError(f"estimator must be one of {', '.join(KL_ESTIMATORS)}, not {estimator!r}")


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy || reference) of each token that the policy sampled.

        x  = log_probs - ref_log_probs, clamped to [-20, 20]
        k3 = exp(-x) - 1 + x

    k3 is never negative, and zero for equal log-probabilities. Its mean over samples of the policy is
    KL(policy || reference). The plain estimate x has the same mean, a larger variance, and a gradient of mean zero: it
    has no effect in a loss. The mean of k3's gradient, (1 - exp(-x)) * d log_probs, is the gradient of the *other*
    divergence, KL(reference || policy), which also has its minimum at the reference model. GRPO uses k3.

    Args:
        log_probs: [t], log-probability of each sampled token under the policy that sampled it.
        ref_log_probs: [t], the same under the reference.

    Returns:
        [t], nats.

    Source: Schulman 2020 (see the module); GRPO, eq. 4.
    """
    x = (log_probs - ref_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-x) + x  # expm1, because exp(-x) - 1 loses all digits of k3 ~ x^2 / 2 near x = 0


def kl_penalties(
    log_probs: npt.NDArray[np.float32],
    ref_log_probs: npt.NDArray[np.float32],
    response_mask: npt.NDArray[np.uint8],
    beta: float,
) -> npt.NDArray[np.float64]:
    """Return the KL penalty of each token in the reward: beta (log_probs - ref_log_probs), which is beta k1.

    In the reward, k1 has exactly the gradient of beta KL(policy || reference): the policy gradient multiplies x by
    d log p, and x's own gradient has mean zero. k2 and k3 have another gradient there.

    Args:
        log_probs: [total], under the policy that sampled.
        ref_log_probs: [total], under the reference.
        response_mask: [total], 1 on the tokens in the loss.
        beta: weight.

    Returns:
        [total], 0 on tokens that are not in the loss, NaN where a log-probability is NaN or infinite.
    """
    in_loss = response_mask == 1
    penalties = np.zeros(len(response_mask))
    with np.errstate(invalid="ignore"):
        penalties[in_loss] = beta * (log_probs[in_loss].astype(np.float64) - ref_log_probs[in_loss])
    return np.where(np.isfinite(penalties), penalties, np.nan)
