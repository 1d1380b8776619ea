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
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_grpo.algorithm.kl import kl_k3
from megatron_grpo.algorithm.losses import MAX_LOG_RATIO
from megatron_grpo.utils.errors import GrpoError


class ImportanceWeights(NamedTuple):
    """Rollout importance weights of the tokens of whole completions."""

    weights: npt.NDArray[np.float32]  # [total], 1 on tokens that are not in the loss
    clipped: npt.NDArray[np.bool_]  # [total], tokens in the loss that a bound truncated or masked


def importance_weights(
    mode: str,
    log_probs: npt.NDArray[np.float32],
    rollout_log_probs: npt.NDArray[np.float32],
    response_mask: npt.NDArray[np.uint8],
    cu_seqlens: npt.NDArray[np.int64],
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

    The weights carry no gradient. They are computed from the flat arrays of the rollout, in which every completion is
    whole, so that the mean of a sequence does not depend on packing or parallel layout.

    Args:
        mode: one of the five.
        log_probs: [total], under the trainer, with the weights that sampled the rollout.
        rollout_log_probs: [total], under the engine.
        response_mask: [total], 1 on the tokens in the loss.
        cu_seqlens: [n + 1], where each sequence begins; the last is the total.
        threshold: upper bound.
        lower_bound: of icepop.

    Raises:
        ValueError: unknown `mode`.
        GrpoError: a log-probability of a token in the loss is missing (NaN) or infinite.

    Source: truncation: Ionides 2008, "Truncated importance sampling"; Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training". Masks: Liu et al. 2025, "When speed kills stability: demystifying RL
    collapse from the training-inference mismatch". icepop: Ling Team 2025, "Every step evolves", arXiv:2510.18855.
    """
    in_loss = response_mask == 1
    known = np.isfinite(log_probs) & np.isfinite(rollout_log_probs)
    if not known[in_loss].all():
        raise GrpoError(
            f"--rollout-importance-sampling-mode {mode} needs the log-probabilities of all sampled tokens, but "
            f"{np.sum(in_loss & ~known)} of {np.sum(in_loss)} are missing or infinite: the engine did not return them, "
            "or the model gives NaN; leave the flag out, or take an engine that returns them"
        )
    log_ratio = np.zeros(len(in_loss))
    log_ratio[in_loss] = log_probs[in_loss].astype(np.float64) - rollout_log_probs[in_loss]
    log_ratio = log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = np.exp(log_ratio)

    bounded = ratio
    if mode in ("sequence_truncate", "sequence_mask"):
        completion = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
        lengths = np.bincount(completion, in_loss)
        bounded = np.exp(np.bincount(completion, log_ratio) / np.maximum(lengths, 1))[completion]
    outside = bounded > threshold
    if mode == "icepop":
        outside |= bounded < lower_bound

    if mode in ("token_truncate", "sequence_truncate"):
        weights = np.minimum(bounded, threshold)
    elif mode in ("token_mask", "sequence_mask", "icepop"):
        weights = np.where(outside, 0.0, ratio)
    else:
        raise ValueError(f"unknown mode of importance sampling {mode!r}")
    weights[~in_loss] = 1.0
    return ImportanceWeights(weights.astype(np.float32), outside & in_loss)


def mismatch(log_probs: Tensor, rollout_log_probs: Tensor) -> dict[str, Tensor]:
    """Return statistics of the difference between the trainer's and the engine's log-probabilities of sampled tokens.

    With d = lp - lp_rollout of a token and r = exp(d), d clamped to [-20, 20] in the exponent:

        mismatch/tokens         number of tokens with an engine log-probability
        mismatch/abs_sum        sum of |d|, nats
        mismatch/log_ratio_sum  sum of d, nats
        mismatch/k3_sum         sum of exp(d) - 1 - d, the k3 estimate of KL(engine || trainer), nats
        mismatch/ratio_sum      sum of r
        mismatch/square_sum     sum of r^2
        mismatch/max            largest |d|, nats; 0 without a token

    Args:
        log_probs: [t], under the trainer, at the weights that sampled (before the first update on the rollout).
        rollout_log_probs: [t], under the engine; NaN where the engine returned none.

    Returns:
        Float64 scalars without gradient; `loss_metrics` defines how micro-batches and ranks are combined.
    """
    known = ~torch.isnan(rollout_log_probs)
    trainer = log_probs.detach().double()
    # Not indexed with the mask: the host would wait for the device to count the known tokens.
    engine = rollout_log_probs.double().where(known, trainer)
    difference = trainer - engine
    ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().where(known, 0.0)
    return {
        "mismatch/tokens": known.sum().double(),
        "mismatch/abs_sum": difference.abs().sum(),
        "mismatch/log_ratio_sum": difference.sum(),
        "mismatch/k3_sum": kl_k3(engine, trainer).sum(),
        "mismatch/ratio_sum": ratio.sum(),
        "mismatch/square_sum": ratio.square().sum(),
        "mismatch/max": difference.abs().max() if len(difference) else difference.sum(),
    }


def mismatch_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an update from its totals of `mismatch`; none if the engine returned no log-probabilities.

    The effective sample size is Kish's, as a fraction of the tokens: (sum r)^2 / (n sum r^2).
    """
    tokens = totals["mismatch/tokens"]
    if not tokens:
        return {}
    return {
        "mismatch/mean_abs": totals["mismatch/abs_sum"] / tokens,
        "mismatch/max_abs": totals["mismatch/max"],
        "mismatch/kl": totals["mismatch/k3_sum"] / tokens,
        "mismatch/perplexity_ratio": float(np.exp(-totals["mismatch/log_ratio_sum"] / tokens)),
        "mismatch/effective_sample_size": totals["mismatch/ratio_sum"] ** 2 / (tokens * totals["mismatch/square_sum"]),
    }
