"""From rewards to advantages: how much better each completion did than the others of the same prompt.

GRPO has no value network. The completions sampled from one prompt form a group, and the mean reward of the group is the
baseline. A group is known by an explicit id, never by its place in the batch: any order, any size, the same numbers.
Sums are exact (`math.fsum`), so not even the last bit depends on the order in which completions arrived.

Everything is over the whole rollout batch, on the host, in float64; results are float32.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

STD_EPSILON = 1e-4  # keeps a group whose rewards hardly differ from being blown up


class GroupAdvantages(NamedTuple):
    """What `group_advantages` found."""

    advantages: npt.NDArray[np.float32]  # [n]
    num_groups: int
    zero_std_groups: int  # groups that teach nothing: all their scored rewards are equal (or only one or none is there)
    mean_std: float  # mean over groups of the standard deviation of their scored rewards


def combine_rewards(rewards: npt.NDArray[np.float32], weights: Sequence[float]) -> npt.NDArray[np.float32]:
    """Weighted sum over reward functions, R = sum over f of weights[f] * rewards[:, f].

    NaN stands for "not scored", "not mine": it is left out of the sum. R is NaN where no function scored.

    Args:
        rewards: [n, f], one column for each reward function.
        weights: f numbers.

    Returns:
        [n].

    Raises:
        ValueError: the number of weights is not that of the columns.
    """
    if rewards.ndim != 2 or rewards.shape[1] != len(weights):
        raise ValueError(f"{len(weights)} reward weights for rewards of shape {rewards.shape}")
    scored = ~np.isnan(rewards)
    total = (np.where(scored, rewards, 0.0) * np.asarray(weights, dtype=np.float64)).sum(axis=1)
    return np.where(scored.any(axis=1), total, np.nan).astype(np.float32)


def group_advantages(
    rewards: npt.NDArray[np.float32],
    group_ids: npt.NDArray[np.int64],
    scale: Literal["group", "batch", "none"],
) -> GroupAdvantages:
    """GRPO's advantage, A_i = (R_i - mean of its group) / (std + 1e-4).

    The std (unbiased, divided by size - 1, as torch.std) is that of the rewards of the group (`scale` "group": every
    prompt weighs the same, however easy), of the whole batch ("batch"), or the division is left out ("none", as Dr.
    GRPO argues: dividing by the group's std gives the too easy and the too hard prompts the largest weights).

    A completion with R = NaN (nothing scored it) has A = 0 and counts in no mean and no std. A group of one, and a
    group whose rewards are all equal, has A = 0.

    Args:
        rewards: [n], finite or NaN.
        group_ids: [n], equal for completions of the same prompt draw.
        scale: "group", "batch" or "none".

    Returns:
        GroupAdvantages; its advantages [n] follow the order of `rewards`.

    Raises:
        ValueError: unknown `scale`.

    Source: GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2); no scaling: Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783); scaling over the batch: Liu et al. 2025 ("Lite PPO"), arXiv:2508.08221.
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale must be group, batch or none, not {scale!r}")
    values = rewards.astype(np.float64)
    scored = ~np.isnan(values)
    batch_std = _std(values[scored])

    advantages = np.zeros(len(values))
    zero_std_groups = 0
    total_std = 0.0
    groups = np.unique(group_ids)
    for group in groups:
        members = np.flatnonzero((group_ids == group) & scored)
        scores = values[members]
        if len(members) < 2 or scores.min() == scores.max():  # rounding in the mean must not look like a signal
            zero_std_groups += 1
            continue
        total_std += _std(scores)
        advantages[members] = scores - _mean(scores)
        if scale != "none":
            advantages[members] /= (_std(scores) if scale == "group" else batch_std) + STD_EPSILON
    return GroupAdvantages(advantages.astype(np.float32), len(groups), zero_std_groups, total_std / max(len(groups), 1))


def _mean(values: npt.NDArray[np.float64]) -> float:
    return math.fsum(values) / len(values)


def _std(values: npt.NDArray[np.float64]) -> float:
    """Unbiased standard deviation; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(math.fsum((values - _mean(values)) ** 2) / (len(values) - 1))
