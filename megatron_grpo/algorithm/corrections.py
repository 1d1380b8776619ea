"""How far the engine that sampled is from the trainer that learns.

The engine and the trainer hold the same weights but not the same kernels, and often not the same precision: the
log-probability of one token differs between them. GRPO takes the samples for the trainer's own, so this difference is
an error that training does not see; it is measured on every rollout, and a sudden rise means that the engine has
missed a weight update.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_grpo.algorithm.losses import kl_k3


class Mismatch(NamedTuple):
    """Sums over tokens, so that micro-batches and ranks add up: the means are abs_sum / tokens and k3_sum / tokens.

    All are float64 scalars. Add the first three, take the maximum of `abs_max`.
    """

    tokens: Tensor  # how many tokens have an engine log-probability
    abs_sum: Tensor  # sum of |lp - lp_rollout|, nats
    k3_sum: Tensor  # sum of the k3 estimate of KL(engine || trainer), nats
    abs_max: Tensor  # largest |lp - lp_rollout|, nats; 0 when there is no token


def mismatch(log_probs: Tensor, rollout_log_probs: Tensor) -> Mismatch:
    """Compare the trainer's log-probabilities of the sampled tokens with those that the engine gave.

    Args:
        log_probs: [t], under the trainer, at the weights that sampled (before the first update on the rollout).
        rollout_log_probs: [t], under the engine; NaN where the engine was not asked.

    Returns:
        Mismatch, without gradient. The tokens come from the engine, so the divergence that k3 estimates is
        KL(engine || trainer): with d = lp - lp_rollout, k3 = exp(d) - 1 - d (see `losses.kl_k3`).
    """
    known = ~torch.isnan(rollout_log_probs)
    trainer, engine = log_probs.detach()[known].double(), rollout_log_probs[known].double()
    difference = (trainer - engine).abs()
    return Mismatch(
        tokens=known.sum().double(),
        abs_sum=difference.sum(),
        k3_sum=kl_k3(engine, trainer).sum(),
        abs_max=difference.max() if known.any() else difference.sum(),
    )
