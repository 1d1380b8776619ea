"""The GRPO loss of each token: a clipped policy-gradient term and a penalty for leaving the reference.

The whole loss of one optimizer update is

    loss = sum over completions i, tokens t of  w[i,t] * (L[i,t] + beta * KL[i,t])

with L from `policy_loss`, KL from `kl_k3` and w from `megatron_grpo.algorithm.weighting`. Everything here is one
token at a time: the tensors are flat, [t], the label tokens of one packed micro-batch in order, so that no padding
exists to be masked.
"""

import torch
from torch import Tensor

# exp(20) is about 5e8: no policy is meant to get there, and beyond it a float32 exp() soon is inf, whose product with
# the zero gradient of the clipped branch is nan. Inside the bound nothing changes.
MAX_LOG_RATIO = 20.0


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    epsilon: float,
    epsilon_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy-gradient loss of each token, and which tokens were clipped.

        rho = exp(log_probs - old_log_probs)
        L   = -min(rho * A, clip(rho, 1 - epsilon, 1 + epsilon_high) * A)

    A > 0 asks for a larger probability, and stops asking once rho > 1 + epsilon_high; A < 0 asks for a smaller one, and
    stops once rho < 1 - epsilon. A clipped token has no gradient. The minimum makes the bound one-sided: a token that
    has moved the *wrong* way is never clipped, so it can always be brought back.

    Args:
        log_probs: [t], log-probability of each sampled token under the policy being trained; carries the gradient.
        old_log_probs: [t], the same under the weights before the first update on this rollout; no gradient. None when
            there is only one update per rollout: both policies are then the same, so rho = 1 in value and the
            gradient is that of plain REINFORCE, -A * d log_probs.
        advantages: [t], A of the completion that each token belongs to.
        epsilon: how far below 1 the ratio may fall.
        epsilon_high: how far above 1 it may rise; equal to epsilon in PPO and GRPO, larger in DAPO ("clip-higher").

    Returns:
        The loss [t], and {"clip_low", "clip_high"}: [t], 1.0 where the clipped branch is the one chosen, else 0.0.

    Source: PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7); GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3); two
    bounds: DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.1).
    """
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    stats = {
        "clip_low": ((ratio < 1 - epsilon) & (advantages < 0)).to(loss.dtype),
        "clip_high": ((ratio > 1 + epsilon_high) & (advantages > 0)).to(loss.dtype),
    }
    return loss, stats


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate, token by token, of KL(policy || reference) from tokens that the policy sampled.

        x  = log_probs - ref_log_probs, clamped to [-20, 20]
        k3 = exp(-x) - 1 + x

    Never negative, zero where the two agree, and its mean over samples of the policy is KL(policy || reference). The
    plain estimate x has the same mean, but a larger variance, and a gradient of mean zero: as a loss it would do
    nothing. The gradient of k3, (1 - exp(-x)) * d log_probs, has as its mean the gradient of the *other* divergence,
    KL(reference || policy): it pulls towards the reference all the same, and is what GRPO uses.

    Args:
        log_probs: [t], log-probability of each sampled token under the policy that sampled it.
        ref_log_probs: [t], the same under the reference.

    Returns:
        [t], nats.

    Source: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html; GRPO, eq. 4.
    """
    x = (log_probs - ref_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-x) + x  # expm1: near x = 0, exp(-x) - 1 would lose every digit of a k3 of about x^2 / 2
