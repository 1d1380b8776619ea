"""Masks of the policy term, and the tokens of the KL-Cov penalty.

A mask multiplies the policy term of a token and does not change any weight w: masking a token does not increase the
weights of the others. All masks but `off_policy_sequences` are computed on the host from all tokens in the loss of an
update, [t], in the order of their completions' sample ids: they do not depend on micro-batches.

They follow from reductions that can be repeated from shares of the completions, with the same result: a sum over all
tokens is the exact sum (fsum) of the sums of each completion, and a selection follows from an order statistic and
counts. Among equal values at the limit of a selection, the first ones are selected.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_grpo.algorithm.losses import completion_mean

Float = npt.NDArray[np.floating]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


def order_statistic(values: Float, rank: int) -> float:
    """Return the value that has position ``rank`` (from 0) among the sorted values."""
    return float(np.partition(values, rank)[rank])


def smallest(values: Float, count: int) -> Bool:
    """Return a mask of the ``count`` smallest values, all if there are fewer; among equal ones, of the first."""
    if count >= len(values):
        return np.ones(len(values), bool)
    chosen = np.zeros(len(values), bool)
    if count > 0:
        limit = order_statistic(values, count - 1)
        chosen = values < limit
        chosen[np.flatnonzero(values == limit)[: count - chosen.sum()]] = True
    return chosen


def sum_by_completion(values: Float, completion: Int64) -> float:
    """Return the exact sum of the completions' sums, each in the order of its tokens; independent of the order of both.

    ``completion`` [t] numbers the completions.
    """
    return math.fsum(np.bincount(completion, values)) if len(values) else 0.0


def top_entropy(entropies: Float, share: float) -> Bool:
    """Return a mask of the ``share`` of tokens with the highest entropy: at least the interpolated 1 - share quantile.

    Source: Wang et al. 2025, "Beyond the 80/20 rule: high-entropy minority tokens drive effective reinforcement
    learning for LLM reasoning", arXiv:2506.01939.
    """
    place = (1 - share) * (len(entropies) - 1)
    low, high = (order_statistic(entropies, rank) for rank in (math.floor(place), math.ceil(place)))
    return entropies.astype(np.float64) >= low + (place - math.floor(place)) * (high - low)


def covariances(advantages: Float, log_probs: Float, completion: Int64) -> Float64:
    """Return (A - mean A)(lp - mean lp) of each token, [t]: tokens with a large value reduce the entropy most.

    ``completion`` [t] is the completion of each token.

    Source: Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models",
    arXiv:2505.22617, eq. 10.
    """

    def centred(values: Float64) -> Float64:
        return values - sum_by_completion(values, completion) / len(values)

    return centred(advantages.astype(np.float64)) * centred(log_probs.astype(np.float64))


def clip_cov(covariances: Float, share: float, low: float, high: float, draws: Float) -> Bool:
    """Return a mask that drops a ``share`` of the tokens (at least one), drawn from covariances in (low, high).

    ``draws`` [t] are random numbers. Tokens with the smallest numbers are dropped, so the choice depends only on the
    tokens' own numbers. If fewer tokens lie between the bounds, all of these are dropped.

    Source: Clip-Cov, arXiv:2505.22617, eq. 11 and 12.
    """
    inside = (covariances > low) & (covariances < high)
    kept = np.ones(len(covariances), bool)
    kept[inside] = ~smallest(draws[inside], max(int(share * len(covariances)), 1))
    return kept


def kl_cov(covariances: Float, share: float) -> Bool:
    """Return a mask of the ``share`` of tokens (at least one) with the largest covariances, for the penalty |d|.

    Source: KL-Cov, arXiv:2505.22617, eq. 13 and 14.
    """
    return smallest(-covariances, max(int(share * len(covariances)), 1))


def second_moment(differences: Float, threshold: float, completion: Int64) -> Bool:
    """Return a mask that drops tokens, largest |difference| first, until the kept mean square is below ``threshold``.

    ``differences`` are lp_old - lp_rollout, ``completion`` [t] is the completion of each token. Among equal
    differences, later tokens are dropped first. The mean of the smallest squares rises with their number, so that the
    number is found by bisection.

    Source: M2PO: Zheng et al. 2025, "Prosperity before collapse: how far can off-policy RL reach with stale data on
    LLMs?", arXiv:2510.01161.
    """
    squares = differences.astype(np.float64) ** 2

    def mean_is_below(count: int) -> bool:
        limit = order_statistic(squares, count - 1)
        below = squares < limit
        total = sum_by_completion(np.where(below, squares, 0.0), completion)
        return (total + (count - int(below.sum())) * limit) / count < threshold

    return smallest(squares, _largest(mean_is_below, len(squares)))


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """Return the largest number in [1, limit] for which ``holds``, which is true up to some number; 0 without one."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


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
