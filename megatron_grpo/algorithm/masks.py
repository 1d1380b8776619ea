"""Masks of the policy term, and the tokens of the KL-Cov penalty.

A mask multiplies the policy term of a token and does not change any weight w: masking a token does not increase the
weights of the others. All masks but `off_policy_sequences` are computed on the host from all tokens in the loss of an
update, in global order, [t]: they do not depend on micro-batches.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_grpo.algorithm.losses import completion_mean

Float = npt.NDArray[np.floating]
Bool = npt.NDArray[np.bool_]


def top_entropy(entropies: Float, share: float) -> Bool:
    """Return a mask of the ``share`` of tokens with the highest entropy: at least the interpolated 1 - share quantile.

    Source: Wang et al. 2025, "Beyond the 80/20 rule: high-entropy minority tokens drive effective reinforcement
    learning for LLM reasoning", arXiv:2506.01939.
    """
    return entropies >= np.quantile(entropies, 1 - share)


def covariances(advantages: Float, log_probs: Float) -> npt.NDArray[np.float64]:
    """Return (A - mean A)(lp - mean lp) of each token, [t]: tokens with a large value reduce the entropy most.

    Source: Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models",
    arXiv:2505.22617, eq. 10.
    """
    advantages, log_probs = advantages.astype(np.float64), log_probs.astype(np.float64)
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())


def clip_cov(covariances: Float, share: float, low: float, high: float, draws: Float) -> Bool:
    """Return a mask that drops a ``share`` of the tokens (at least one), drawn from covariances in (low, high).

    ``draws`` [t] are random numbers. Tokens with the smallest numbers are dropped, so the choice depends only on the
    tokens' own numbers. If fewer tokens lie between the bounds, all of these are dropped.

    Source: Clip-Cov, arXiv:2505.22617, eq. 11 and 12.
    """
    inside = np.flatnonzero((covariances > low) & (covariances < high))
    dropped = inside[np.argsort(draws[inside], kind="stable")[: max(int(share * len(covariances)), 1)]]
    kept = np.ones(len(covariances), bool)
    kept[dropped] = False
    return kept


def kl_cov(covariances: Float, share: float) -> Bool:
    """Return a mask of the ``share`` of tokens (at least one) with the largest covariances, for the penalty |d|.

    Source: KL-Cov, arXiv:2505.22617, eq. 13 and 14.
    """
    chosen = np.zeros(len(covariances), bool)
    chosen[np.argsort(-covariances, kind="stable")[: max(int(share * len(covariances)), 1)]] = True
    return chosen


def second_moment(differences: Float, threshold: float) -> Bool:
    """Return a mask that drops tokens, largest |difference| first, until the kept mean square is below ``threshold``.

    ``differences`` are lp_old - lp_rollout. Among equal differences, later tokens are dropped first.

    Source: M2PO: Zheng et al. 2025, "Prosperity before collapse: how far can off-policy RL reach with stale data on
    LLMs?", arXiv:2510.01161.
    """
    squares = differences.astype(np.float64) ** 2
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, len(squares) + 1)  # rises with the number of kept tokens
    kept = np.zeros(len(squares), bool)
    kept[order[: np.searchsorted(means, threshold)]] = True
    return kept


def off_policy_sequences(
    log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, completion: Tensor, delta: float
) -> Tensor:
    """Return a mask: 0.0 on completions with A < 0 and a mean of lp_rollout - lp above ``delta``, else 1.0.

    Args:
        log_probs: [t], under the policy being trained.
        rollout_log_probs: [t], as the engine sampled.
        advantages: [t].
        completion: [t].
        delta: nats a token.

    Returns:
        [t], without gradient.

    Source: DeepSeek-V3.2 (2025, arXiv:2512.02556, section 3.1), off-policy sequence masking.
    """
    left_behind = completion_mean(rollout_log_probs - log_probs.detach(), completion) > delta
    return torch.where(left_behind & (advantages < 0), 0.0, 1.0).to(log_probs.dtype)
