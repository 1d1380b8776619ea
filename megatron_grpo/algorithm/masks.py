"""Masks of the policy term, and the tokens of the KL-Cov penalty.

A mask multiplies the policy term of a token and does not change any weight w: masking a token does not increase the
weights of the others. All masks but `off_policy_sequences` are computed on the host for the tokens in the loss of an
update, [t], in the order of their completions' sample ids: they do not depend on micro-batches.

No rank needs all of these tokens: the masks follow from reductions (`Tokens`) with the same result from any share of
the completions. A sum over all tokens is the exact sum (fsum) of the sums of each completion, and a selection follows
from an order statistic and counts. Among equal values at the limit of a selection, the first ones are selected.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_grpo.algorithm.losses import completion_mean

Float = npt.NDArray[np.floating]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Gather = Callable[[npt.NDArray[Any]], Float64]


class Tokens:
    """The tokens in the loss of an update, [t], of which this rank has those of some completions: reductions over all.

    Every reduction follows from one number of each completion, which ``gather`` completes.
    """

    def __init__(self, completion: Int64, num_completions: int, gather: Gather = lambda values: values):
        """``completion`` [t] numbers the completions of the update in ascending order, from 0 to ``num_completions``.

        ``gather(values)`` [..., num_completions] returns, on every rank, the values of all completions from those of
        this rank's completions.
        """
        self.completion, self.num_completions, self.gather = completion, num_completions, gather

    def only(self, chosen: Bool) -> "Tokens":
        """Return the tokens of which ``chosen`` [t] is true."""
        return Tokens(self.completion[chosen], self.num_completions, self.gather)

    def sum(self, values: Float) -> float:
        """Return the exact sum of the completions' sums, each in the order of its tokens."""
        return math.fsum(self._sums(values))

    def count(self, chosen: Bool | None = None) -> int:
        """Return how many tokens are ``chosen``, by default all."""
        return int(self._sums(np.ones(len(self.completion)) if chosen is None else chosen).sum())

    def largest(self, values: Float) -> float:
        """Return the largest value; -inf without any."""
        largest = np.full(self.num_completions, -np.inf)
        np.maximum.at(largest, self.completion, values)
        return float(self.gather(largest).max(initial=-np.inf))

    def order_statistic(self, values: Float, rank: int) -> float:
        """Return the value that has position ``rank`` (from 0) among the sorted values."""
        keys = _keys(values)
        return _value(_first(lambda key: self.count(keys <= key) > rank))

    def smallest(self, values: Float, count: int) -> Bool:
        """Return a mask of the ``count`` smallest values, all if there are fewer; among equal ones, of the first."""
        if count >= self.count():
            return np.ones(len(values), bool)
        if count <= 0:
            return np.zeros(len(values), bool)
        limit = self.order_statistic(values, count - 1)
        chosen, equal = values < limit, np.flatnonzero(values == limit)
        of_each = self._sums(values == limit).astype(np.int64)  # equal ones of each completion
        before = np.cumsum(of_each) - of_each
        own = self.completion[equal]
        place = before[own] + np.arange(len(own)) - np.searchsorted(own, own)
        chosen[equal[place < count - self.count(chosen)]] = True
        return chosen

    def _sums(self, values: Float | Bool) -> Float64:
        return self.gather(np.bincount(self.completion, values, self.num_completions))


# Float64 numbers as integers in the same order: an order statistic is found by the bisection of integers.
def _keys(values: Float) -> Int64:
    bits = (values.astype(np.float64) + 0.0).view(np.int64)  # + 0.0: the sign of zero does not count
    return np.where(bits < 0, bits ^ np.iinfo(np.int64).max, bits)


def _value(key: int) -> float:
    bits = np.int64(key)
    return float((bits ^ np.iinfo(np.int64).max if bits < 0 else bits).view(np.float64))


def _first(holds: Callable[[int], bool]) -> int:
    """Return the smallest int64 for which ``holds``, which is true from some number on."""
    low, high = -(2**63), 2**63 - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def top_entropy(entropies: Float, share: float, tokens: Tokens) -> Bool:
    """Return a mask of the ``share`` of tokens with the highest entropy: at least the interpolated 1 - share quantile.

    Source: Wang et al. 2025, "Beyond the 80/20 rule: high-entropy minority tokens drive effective reinforcement
    learning for LLM reasoning", arXiv:2506.01939.
    """
    place = (1 - share) * (tokens.count() - 1)
    low, high = (tokens.order_statistic(entropies, rank) for rank in (math.floor(place), math.ceil(place)))
    return entropies.astype(np.float64) >= low + (place - math.floor(place)) * (high - low)


def covariances(advantages: Float, log_probs: Float, tokens: Tokens) -> Float64:
    """Return (A - mean A)(lp - mean lp) of each token, [t]: tokens with a large value reduce the entropy most.

    Source: Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models",
    arXiv:2505.22617, eq. 10.
    """

    def centred(values: Float64) -> Float64:
        return values - tokens.sum(values) / tokens.count()

    return centred(advantages.astype(np.float64)) * centred(log_probs.astype(np.float64))


def clip_cov(covariances: Float, share: float, low: float, high: float, draws: Float, tokens: Tokens) -> Bool:
    """Return a mask that drops a ``share`` of the tokens (at least one), drawn from covariances in (low, high).

    ``draws`` [t] are random numbers. Tokens with the smallest numbers are dropped, so the choice depends only on the
    tokens' own numbers. If fewer tokens lie between the bounds, all of these are dropped.

    Source: Clip-Cov, arXiv:2505.22617, eq. 11 and 12.
    """
    inside = (covariances > low) & (covariances < high)
    kept = np.ones(len(covariances), bool)
    kept[inside] = ~tokens.only(inside).smallest(draws[inside], max(int(share * tokens.count()), 1))
    return kept


def kl_cov(covariances: Float, share: float, tokens: Tokens) -> Bool:
    """Return a mask of the ``share`` of tokens (at least one) with the largest covariances, for the penalty |d|.

    Source: KL-Cov, arXiv:2505.22617, eq. 13 and 14.
    """
    return tokens.smallest(-covariances, max(int(share * tokens.count()), 1))


def second_moment(differences: Float, threshold: float, tokens: Tokens) -> Bool:
    """Return a mask that drops tokens, largest |difference| first, until the kept mean square is below ``threshold``.

    ``differences`` are lp_old - lp_rollout. Among equal differences, later tokens are dropped first. The mean of the
    smallest squares rises with their number, so that the largest kept square is found by bisection.

    Source: M2PO: Zheng et al. 2025, "Prosperity before collapse: how far can off-policy RL reach with stale data on
    LLMs?", arXiv:2510.01161.
    """
    squares = differences.astype(np.float64) ** 2
    keys = _keys(squares)

    def below(limit: float) -> tuple[float, int]:
        """Return the sum and the number of the squares below ``limit``."""
        chosen = squares < limit
        return tokens.sum(np.where(chosen, squares, 0.0)), tokens.count(chosen)

    def too_many(key: int) -> bool:
        """Return whether the squares up to a limit have a mean that is not below the threshold."""
        limit = tokens.largest(np.where(keys <= key, squares, -np.inf))
        total, smaller = below(limit)
        count = tokens.count(keys <= key)
        return count > 0 and not (total + (count - smaller) * limit) / count < threshold

    if (limit := tokens.largest(squares)) < 0 or not too_many(int(_keys(np.array([limit]))[0])):
        return np.ones(len(squares), bool)
    limit = _value(_first(too_many))  # of these squares some are dropped
    total, smaller = below(limit)
    equal = tokens.count(squares == limit)
    fit = _largest(lambda more: (total + more * limit) / (smaller + more) < threshold, equal)
    return tokens.smallest(squares, smaller + fit)


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
