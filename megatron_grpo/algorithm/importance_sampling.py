"""Mismatch between engine and trainer: metrics, and rollout importance weights.

Engine and trainer hold the same weights but use different kernels, and often different precisions, so their
log-probabilities of a token differ. GRPO treats the samples as the trainer's own: the difference is an error that the
loss does not show. `mismatch` measures the difference; a sudden rise means that the engine missed a weight update.
`importance_weights` corrects the error: the policy term of a token is multiplied by r = p(trainer) / p(engine), so that
the mean over the engine's samples is an expectation under the trainer. The weights are bounded, because a few large
ratios would dominate the gradient.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.algorithm.kl import kl_k3
from megatron_grpo.algorithm.losses import MAX_LOG_RATIO, completion_mean


class ImportanceWeights(NamedTuple):
    """Rollout importance weights of tokens in the loss."""

    weights: Tensor  # [t]
    clipped: Tensor  # [t], bool: a bound truncated or masked the token


@torch.no_grad()
def importance_weights(
    mode: str,
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    completion: Tensor,
    threshold: float,
    lower_bound: float | None = None,
) -> ImportanceWeights:
    """Return the rollout importance weight of each token, which multiplies its policy term.

    With r[i,t] = exp(log_probs - rollout_log_probs), the exponent clamped to [-20, 20], and g_i the geometric mean of r
    over the tokens of completion i that are in the loss:

        token_truncate     min(r, threshold)
        token_mask         r where r <= threshold, else 0
        sequence_truncate  min(g_i, threshold)
        sequence_mask      r where g_i <= threshold, else 0
        icepop             r where lower_bound <= r <= threshold, else 0

    The weights carry no gradient. A completion is whole in its pack, so they do not depend on the packing.

    Args:
        mode: one of the five.
        log_probs: [t], under the trainer, before the first update on the rollout.
        rollout_log_probs: [t], under the engine.
        completion: [t], of each token.
        threshold: upper bound.
        lower_bound: of icepop.

    Raises:
        ValueError: unknown `mode`.

    Source: truncation: Ionides 2008, "Truncated importance sampling"; Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training". Masks: Liu et al. 2025, "When speed kills stability: demystifying RL
    collapse from the training-inference mismatch". icepop: Ling Team 2025, "Every step evolves", arXiv:2510.18855.
    """
    log_ratio = (log_probs - rollout_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = bounded = log_ratio.exp()
    if mode in ("sequence_truncate", "sequence_mask"):
        bounded = completion_mean(log_ratio, completion).exp()
    outside = bounded > threshold
    if mode == "icepop":
        assert lower_bound is not None
        outside |= bounded < lower_bound
    if mode in ("token_truncate", "sequence_truncate"):
        return ImportanceWeights(bounded.clamp(max=threshold), outside)
    if mode in ("token_mask", "sequence_mask", "icepop"):
        return ImportanceWeights(ratio.masked_fill(outside, 0.0), outside)
    raise ValueError(f"unknown mode of importance sampling {mode!r}")


def mismatch(log_probs: Tensor, rollout_log_probs: Tensor, newest: Tensor | None = None) -> dict[str, Tensor]:
    """Return statistics of the difference between the trainer's and the engine's log-probabilities of sampled tokens.

    With d = lp - lp_rollout of a token and r = exp(d), d clamped to [-20, 20] in the exponent:

        mismatch/tokens         number of tokens with an engine log-probability
        mismatch/abs_sum        sum of |d|, nats
        mismatch/log_ratio_sum  sum of d, nats
        mismatch/k3_sum         sum of exp(d) - 1 - d, the k3 estimate of KL(engine || trainer), nats
        mismatch/ratio_sum      sum of r
        mismatch/square_sum     sum of r^2
        mismatch/max            largest |d|, nats; 0 without a token
        mismatch/newest_tokens, mismatch/newest_abs_sum  the first two of the tokens of ``newest``

    Args:
        log_probs: [t], under the trainer, at the weights that sampled (before the first update on the rollout).
        rollout_log_probs: [t], under the engine; NaN where the engine returned none.
        newest: [t], 1 where the engine had the trainer's weights, else 0; None: everywhere.

    Returns:
        Float64 scalars without gradient; `loss_metrics` defines how micro-batches and ranks are combined.
    """
    known = ~torch.isnan(rollout_log_probs)
    trainer = log_probs.detach().double()
    # Not indexed with the mask: the host would wait for the device to count the known tokens.
    engine = rollout_log_probs.double().where(known, trainer)
    difference = trainer - engine
    ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().where(known, 0.0)
    values = {
        "mismatch/tokens": known.sum().double(),
        "mismatch/abs_sum": difference.abs().sum(),
        "mismatch/log_ratio_sum": difference.sum(),
        "mismatch/k3_sum": kl_k3(engine, trainer).sum(),
        "mismatch/ratio_sum": ratio.sum(),
        "mismatch/square_sum": ratio.square().sum(),
        "mismatch/max": difference.abs().max() if len(difference) else difference.sum(),
    }
    if newest is not None:
        values["mismatch/newest_tokens"] = newest.where(known, 0.0).sum().double()
        values["mismatch/newest_abs_sum"] = (newest * difference.abs()).sum()
    return values


def mismatch_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an update from its totals of `mismatch`; none if the engine returned no log-probabilities.

    The effective sample size is Kish's, as a fraction of the tokens: (sum r)^2 / (n sum r^2).
    """
    tokens = totals["mismatch/tokens"]
    if not tokens:
        return {}
    row = {
        "mismatch/mean_abs": totals["mismatch/abs_sum"] / tokens,
        "mismatch/max_abs": totals["mismatch/max"],
        "mismatch/kl": totals["mismatch/k3_sum"] / tokens,
        "mismatch/perplexity_ratio": float(np.exp(-totals["mismatch/log_ratio_sum"] / tokens)),
        "mismatch/effective_sample_size": totals["mismatch/ratio_sum"] ** 2 / (tokens * totals["mismatch/square_sum"]),
    }
    if totals.get("mismatch/newest_tokens"):
        row["mismatch/newest_mean_abs"] = totals["mismatch/newest_abs_sum"] / totals["mismatch/newest_tokens"]
    return row
