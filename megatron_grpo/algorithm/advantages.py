"""Advantage estimators: comparison of each completion with the others of its prompt, or of the batch.

GRPO has no value network. The completions sampled from one prompt form a group, and the mean reward of the group is the
baseline. A group has an explicit id and does not depend on positions in the batch. Sums are exact (`math.fsum`), so
that the order in which completions arrive changes no bit.

All functions work on the whole rollout batch, on the host, in float64; results are float32. R = NaN marks a completion
without a reward: its advantage is 0, and no mean, standard deviation or size counts it. Standard deviations are
unbiased (divided by size - 1, as torch.std).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_grpo.algorithm.groups import by_group
from megatron_grpo.algorithm.registry import ADVANTAGES, Flag, register_advantage
from megatron_grpo.utils.errors import GrpoError

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

DIGITS = 6  # that float32 holds

Scale = Literal["group", "batch", "none"]
Gather = Callable[[npt.NDArray[Any]], Float64]

# An estimator reads the flags that are parameters of its function.
ADVANTAGES.declare(
    Flag("--pass-at-k", int, None, "pass_at_k: optimise the best of this many completions"),
    Flag(
        "--gamma",
        float,
        1.0,
        "reinforce_plus_plus: discount of later rewards, per token",
        positive=True,
        within=(0, 1),
    ),
    Flag(
        "--turn-gamma",
        float,
        1.0,
        "turn_returns, gigpo: discount of later rewards, per turn",
        positive=True,
        within=(0, 1),
    ),
    Flag(
        "--gigpo-weight", float, 1.0, "gigpo: weight of the comparison of turns that follow equal states", positive=True
    ),
)

STD_EPSILON = 1e-4  # bounds the scale of groups whose rewards hardly differ


def combine_rewards(rewards: Float32, weights: Sequence[float]) -> Float32:
    """Return the weighted sum over reward functions, R = sum over f of weights[f] * rewards[:, f].

    The sum leaves out NaN, which means "not scored". R is NaN for a completion that no function scored. A sum of
    several is rounded to 6 digits of its largest term: sums that differ by the rounding of float32 alone are equal.

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
    parts = np.where(scored, rewards, 0.0) * np.asarray(weights, dtype=np.float64)
    total, largest = parts.sum(axis=1), np.abs(parts).max(axis=1, initial=0)
    own = (scored.sum(axis=1) > 1) & (largest > 0) & np.isfinite(largest)
    units = 10 ** (DIGITS - np.ceil(np.log10(largest[own])))
    total[own] = np.round(total[own] * units) / units  # 0.1 + 0.6 and 0.7, each rounded to float32, are equal
    return np.where(scored.any(axis=1), total, np.nan).astype(np.float32)


class GroupStatistics(NamedTuple):
    """Statistics of the rewards of all groups."""

    num_groups: int
    zero_std_groups: int  # groups without a signal: fewer than two scored rewards, or all equal
    mean_std: float  # mean over groups of the standard deviation of their scored rewards


def group_statistics(rewards: Float32, group_ids: Int64) -> GroupStatistics:
    """Return the statistics of R [n] over groups; ``group_ids`` [n] is the group of each completion."""
    num_groups = len(np.unique(group_ids))
    stds = [_std(rewards[members].astype(np.float64)) for members in _groups(rewards, group_ids)]
    return GroupStatistics(num_groups, num_groups - len(stds), math.fsum(stds) / max(num_groups, 1))


@register_advantage("grpo", scale="group", example=None)
def group_advantages(rewards: Float32, group_ids: Int64, scale_rewards: Scale) -> Float32:
    """Return GRPO's advantages, A_i = (R_i - mean of its group) / (std + 1e-4).

    The std is that of the rewards of the group (`scale_rewards` "group": every prompt has the same weight), of the
    whole batch ("batch"), or there is no division ("none", as in Dr. GRPO: the division by the group's std gives the
    largest weights to prompts that are too easy or too hard).

    A group of one, and a group whose rewards are all equal, has A = 0.

    Args:
        rewards: [n], finite or NaN.
        group_ids: [n], equal for completions of the same prompt draw.
        scale_rewards: "group", "batch" or "none".

    Returns:
        [n], in the order of `rewards`.

    Raises:
        ValueError: unknown `scale_rewards`.

    Source: GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2); no scaling: Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783); scaling over the batch: Liu et al. 2025 ("Lite PPO"), arXiv:2508.08221.
    """
    values = rewards.astype(np.float64)
    return _scaled(_centred(values, group_ids), values, group_ids, scale_rewards)


@register_advantage("rloo", example=None)
def rloo_advantages(rewards: Float32, group_ids: Int64, scale_rewards: Scale) -> Float32:
    """Return RLOO's advantages: the baseline of a completion is the mean reward of the *others* of its group.

        A_i = R_i - mean of R_j over j != i  =  G / (G - 1) (R_i - mean of the group),   G = scored completions in it

    so that the baseline does not depend on the completion itself, and the gradient is unbiased. Arguments, scaling (by
    the std of the rewards, usually "none"), result and errors are those of `group_advantages`.

    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024,
    arXiv:2402.14740.
    """
    values = rewards.astype(np.float64)
    advantages = _centred(values, group_ids)
    for members in _groups(values, group_ids):
        advantages[members] *= len(members) / (len(members) - 1)
    return _scaled(advantages, values, group_ids, scale_rewards)


def _tokens_differ(kl_in_reward: bool, gamma: float) -> str | None:
    return "--kl-in-reward" if kl_in_reward else "--gamma" if gamma < 1 else None


@register_advantage(
    "reinforce_plus_plus",
    scale="batch",
    per_token=True,
    tokens_differ=_tokens_differ,
    compares_group=False,
    example="--kl-in-reward --gamma 0.9",
)
def reinforce_plus_plus_advantages(
    rewards: Float32,
    penalties: Float64 | None,
    response_mask: npt.NDArray[np.uint8],
    cu_seqlens: Int64,
    gamma: float,
    gather: Gather = lambda values: values,
) -> Float32:
    """Return REINFORCE++'s advantages: discounted returns of each token, normalised over all tokens of the batch.

        r_t = -penalty_t, plus R at the completion's last token in the loss
        G_t = r_t + gamma G_{t+1}, over the tokens in the loss of the completion (others are skipped)
        A_t = (G_t - mean of G) / (std of G + 1e-4), over all tokens in the loss of the batch

    There are no groups: the batch is the baseline. Without penalties and with gamma 1 all tokens of a completion have
    the same A.

    Args:
        rewards: [n], finite or NaN.
        penalties: [total], of `kl.kl_penalties`, or None for none.
        response_mask: [total], 1 on tokens in the loss.
        cu_seqlens: [n + 1], where each sequence begins in the flat arrays; the last is the total.
        gamma: discount of later rewards per token, at most 1.
        gather: returns values [..., n] of all completions from those of the completions whose tokens are in the flat
            arrays; the sequences of the others are empty.

    Returns:
        [total], 0 on tokens that are not in the loss.

    Source: Hu et al. 2025, "REINFORCE++", arXiv:2501.03262.
    """
    completion = np.repeat(np.arange(len(rewards)), np.diff(cu_seqlens))
    tokens = np.flatnonzero((response_mask == 1) & ~np.isnan(rewards)[completion])
    owner = completion[tokens]
    lengths = np.bincount(owner, minlength=len(rewards))
    last = np.cumsum(lengths) - 1
    returns = np.zeros(len(tokens)) if penalties is None else -penalties[tokens]
    spoke = lengths > 0
    returns[last[spoke]] += rewards[spoke]
    for step in range(1, int(lengths.max(initial=0))):  # from the last token backwards, over all completions at once
        longer = last[lengths > step] - step
        returns[longer] += gamma * returns[longer + 1]
    advantages = np.zeros(len(response_mask), np.float32)
    n = len(rewards)
    highest, lowest = np.full((2, n), -np.inf)
    np.maximum.at(highest, owner, returns)
    np.maximum.at(lowest, owner, -returns)
    counts, highest, lowest = gather(np.stack([lengths, highest, lowest]))
    if -lowest.max(initial=-np.inf) < highest.max(initial=-np.inf):
        # Sums within a completion first: an exact sum over millions of tokens would take seconds.
        count = int(counts.sum())
        mean = math.fsum(gather(np.bincount(owner, returns, n))) / count
        variance = math.fsum(gather(np.bincount(owner, (returns - mean) ** 2, n))) / (count - 1)
        advantages[tokens] = (returns - mean) / (math.sqrt(variance) + STD_EPSILON)
    return advantages


@register_advantage("reinforce_plus_plus_baseline", scale="batch", example=None)
def reinforce_plus_plus_baseline_advantages(rewards: Float32, group_ids: Int64) -> Float32:
    """Return REINFORCE++'s advantages with baseline: rewards centred in the group and scaled over the batch.

        c_i = R_i - mean of its group,   A_i = c_i / (std of c over the batch + 1e-4)

    `group_advantages` with "batch" divides by the std of R instead, which grows with differences between prompts.

    Args:
        rewards: [n], finite or NaN.
        group_ids: [n].

    Returns:
        [n].

    Source: Hu et al. 2025, "REINFORCE++", arXiv:2501.03262.
    """
    values = rewards.astype(np.float64)
    centred = _centred(values, group_ids)
    return (centred / (_std(centred[~np.isnan(values)]) + STD_EPSILON)).astype(np.float32)


def _check_pass_at_k(pass_at_k: int | None, num_generations: int, kl_in_reward: bool) -> None:
    if pass_at_k is None:
        raise GrpoError("--advantage-estimator pass_at_k needs --pass-at-k, the number k of completions")
    if not 2 <= pass_at_k <= num_generations:
        raise GrpoError(
            f"--pass-at-k ({pass_at_k}) must lie between 2 and --num-generations ({num_generations}): k "
            "completions are drawn from those of a prompt; for k = 1 use --advantage-estimator rloo"
        )
    if kl_in_reward:
        raise GrpoError(
            "--kl-in-reward and --advantage-estimator pass_at_k cannot both be given: only the best "
            "of k counts, so the KL penalty would not apply to the others: remove --kl-in-reward"
        )


@register_advantage("pass_at_k", check=_check_pass_at_k, example=None)
def pass_at_k_advantages(rewards: Float32, group_ids: Int64, pass_at_k: int, scale_rewards: Scale) -> Float32:
    """Return advantages with the unbiased gradient of E[max reward of k completions], from G >= k completions.

    For rewards 0 and 1 this expectation is pass@k.

        s_i = sum over subsets I of the group with k members, i among them, of (max of I - max of I without i) / C(G, k)
        A_i = G s_i

    The maximum without i is a baseline that does not depend on i. In ascending order of rewards, R_1 <= ... <= R_G, a
    subset counts if i is its best and some j < i its second best, with C(j - 1, k - 2) choices for the rest:

        A_i = G / C(G, k) * sum over j < i of C(j - 1, k - 2) (R_i - R_j)

    A is never negative, and large if few completions of the group solved the prompt. k is at least 2 (k = 1 is `rloo`).
    A group with fewer than k scored completions, or with equal rewards, has A = 0.

    Args:
        rewards: [n], finite or NaN; any numbers.
        group_ids: [n].
        pass_at_k: k, at least 2.
        scale_rewards: as in `group_advantages`, the std being that of the rewards.

    Returns:
        [n].

    Raises:
        ValueError: k below 2, or unknown `scale_rewards`.

    Source: Walder & Karkhanis 2025, "Pass@K policy optimization", arXiv:2505.15201: the continuous estimator with its
    leave-one-out baseline of k - 1 samples.
    """
    k = pass_at_k
    if k < 2:
        raise ValueError(f"k must be at least 2, not {k}")
    values = rewards.astype(np.float64)
    advantages = np.zeros(len(values))
    for members in _groups(values, group_ids):
        size = len(members)
        if size < k:
            continue
        ascending = members[np.argsort(values[members], kind="stable")]
        ordered = values[ascending]
        # C(j, k - 2) / C(G, k) for j = 0 ... G - 2, as a product from the end: binomials would overflow float64.
        j = np.arange(size - 2, 0, -1)
        factors = np.concatenate([[k * (k - 1) / (size * (size - 1))], np.maximum(j - k + 2, 0) / j])
        shares = np.cumprod(factors)[::-1]
        for place, i in enumerate(ascending):
            advantages[i] = size * (shares[:place] * (ordered[place] - ordered[:place])).sum()
    return _scaled(advantages, values, group_ids, scale_rewards)


def _check_gdpo(reward_funcs: list[str], kl_in_reward: bool) -> None:
    if reward_funcs and len(reward_funcs) < 2:
        raise GrpoError(
            "--advantage-estimator gdpo normalises each reward function separately, but --reward-funcs names only one: "
            "give --advantage-estimator grpo, which is the same up to a constant"
        )
    if kl_in_reward:
        raise GrpoError(
            "--kl-in-reward and --advantage-estimator gdpo cannot both be given: gdpo normalises each reward function "
            "separately, so that there is no sum from which the KL could be subtracted"
        )


@register_advantage("gdpo", scale="batch", check=_check_gdpo, example=None)
def gdpo_advantages(function_rewards: Float32, group_ids: Int64, reward_weights: Sequence[float]) -> Float32:
    """Return GDPO's advantages: each reward function is normalised separately before the sum, so that none dominates.

        z_if = (r_if - mean over its group) / (std over its group + 1e-4),   a_i = sum over f of w_f z_if
        A_i  = (a_i - mean of a over the batch) / (std of a over the batch + 1e-4)

    A completion that a function did not score (NaN) is left out of its mean and std, and of the sum.

    Args:
        function_rewards: [n, f].
        group_ids: [n].
        reward_weights: w, f numbers.

    Returns:
        [n].

    Raises:
        ValueError: the number of weights is not that of the columns.

    Source: Liu et al. 2026, "GDPO: group reward-decoupled normalization policy optimization for multi-reward RL
    optimization", arXiv:2601.05242.
    """
    if function_rewards.ndim != 2 or function_rewards.shape[1] != len(reward_weights):
        raise ValueError(f"{len(reward_weights)} reward weights for rewards of shape {function_rewards.shape}")
    total = np.zeros(len(function_rewards))
    for column, weight in zip(function_rewards.T, reward_weights, strict=True):
        total += weight * group_advantages(column, group_ids, "group").astype(np.float64)
    total[np.isnan(function_rewards).all(axis=1)] = np.nan
    return _whitened(total).astype(np.float32)


def turn_returns(rewards: Float32, turn_rewards: Float32, turns: Int64, gamma: float) -> Float64:
    """Return the discounted returns of the turns of episodes.

        r_t = the environment's reward of turn t, and in the last turn also R minus the sum of all of these
        G_t = r_t + gamma G_{t+1}

    Args:
        rewards: [n], R.
        turn_rewards: [n, most turns], NaN where the environment gave none.
        turns: [n], number of turns of each episode.
        gamma: discount of later rewards per turn, at most 1.

    Returns:
        [n, most turns], NaN after the last turn and for R = NaN.
    """
    own = np.nan_to_num(turn_rewards.astype(np.float64))
    there = np.arange(own.shape[1]) < turns[:, None]
    own[~there] = 0.0
    own[np.arange(len(own)), turns - 1] += rewards - own.sum(axis=1)
    returns = own.copy()
    for turn in reversed(range(own.shape[1] - 1)):
        returns[:, turn] += gamma * returns[:, turn + 1]
    return np.where(there, returns, np.nan)


def _of_tokens(
    advantages: npt.NDArray[np.floating], response_mask: npt.NDArray[np.uint8], cu_seqlens: Int64
) -> Float32:
    """Return [total] of the advantages [n, most turns]: a turn is a run of tokens in the loss; 0 on other tokens."""
    sampled = response_mask == 1
    begins = sampled & ~np.concatenate([[False], sampled[:-1]])  # a sequence begins with its prompt
    count = np.concatenate([[0], np.cumsum(begins)])
    completion = np.repeat(np.arange(len(advantages)), np.diff(cu_seqlens))
    turn = count[1:] - count[cu_seqlens[:-1]][completion] - 1
    result = np.zeros(len(response_mask), np.float32)
    result[sampled] = advantages[completion[sampled], turn[sampled]]
    return result


def _check_turns(environment: str | None, agent: str | None, advantage_estimator: str) -> None:
    if environment is None or agent is not None:
        raise GrpoError(
            f"--advantage-estimator {advantage_estimator} needs --environment: only the turns of an episode have "
            "rewards and states of their own"
        )


@register_advantage("turn_returns", scale="group", per_token=True, check=_check_turns, example=None)
def turn_return_advantages(
    rewards: Float32,
    turn_rewards: Float32,
    turns: Int64,
    group_ids: Int64,
    response_mask: npt.NDArray[np.uint8],
    cu_seqlens: Int64,
    turn_gamma: float,
    scale_rewards: Scale,
) -> Float32:
    """Return the advantage of each turn: its return compared with those of the same turn in the group.

        A_t = (G_t - mean of G_t over the group's episodes with a turn t) / scale

    with G of `turn_returns`; the scale is that of `group_advantages`, over the same values. A turn that no other
    episode of the group has gets 0. With the only reward at the end and gamma 1, G_t = R.

    Args:
        rewards, group_ids: [n].
        turn_rewards: [n, most turns].
        turns: [n].
        response_mask: [total], 1 on sampled tokens.
        cu_seqlens: [n + 1].
        turn_gamma: discount per turn.
        scale_rewards: as of `group_advantages`.

    Returns:
        [total], 0 on tokens that are not in the loss.

    Source: returns to go with a baseline of the group that may depend on the time step (Williams 1992, REINFORCE;
    Greensmith et al. 2004, JMLR 5:1471); for turns Zeng et al. 2025, arXiv:2505.11821.
    """
    returns = turn_returns(rewards, turn_rewards, turns, turn_gamma)
    most = returns.shape[1]
    ids = (group_ids[:, None] * most + np.arange(most)).reshape(-1)
    values = returns.reshape(-1)
    advantages = _scaled(_centred(values, ids), values, ids, scale_rewards).reshape(returns.shape)
    return _of_tokens(advantages, response_mask, cu_seqlens)


@register_advantage("gigpo", scale="group", per_token=True, check=_check_turns, example=None)
def gigpo_advantages(
    rewards: Float32,
    turn_rewards: Float32,
    turn_states: Int64,
    turns: Int64,
    group_ids: Int64,
    response_mask: npt.NDArray[np.uint8],
    cu_seqlens: Int64,
    turn_gamma: float,
    gigpo_weight: float,
    scale_rewards: Scale,
) -> Float32:
    """Return GiGPO's advantages: of the episode in its group, and of each turn among those that follow the same state.

        A_t = A_episode + weight * (G_t - mean of G over the group's turns in state s_t) / scale

    A_episode is that of `group_advantages`, G of `turn_returns`. A state is what the environment said before the turn;
    the first turns of a group are in one state.

    Args:
        rewards, group_ids: [n].
        turn_rewards: [n, most turns].
        turn_states: [n, most turns], a number for each state.
        turns: [n].
        response_mask: [total], 1 on sampled tokens.
        cu_seqlens: [n + 1].
        turn_gamma: discount per turn.
        gigpo_weight: weight of the turns.
        scale_rewards: as of `group_advantages`; the paper has group and none.

    Returns:
        [total], 0 on tokens that are not in the loss.

    Source: Feng et al. 2025, "Group-in-Group Policy Optimization", arXiv:2505.10978, equations 4 to 8.
    """
    returns = turn_returns(rewards, turn_rewards, turns, turn_gamma)
    state = np.unique(turn_states, return_inverse=True)[1].reshape(returns.shape)
    ids = (np.unique(group_ids, return_inverse=True)[1][:, None] * (state.max(initial=0) + 1) + state).reshape(-1)
    values = returns.reshape(-1)
    of_turns = _scaled(_centred(values, ids), values, ids, scale_rewards).reshape(returns.shape)
    of_episodes = group_advantages(rewards, group_ids, scale_rewards)
    return _of_tokens(of_episodes[:, None] + gigpo_weight * of_turns, response_mask, cu_seqlens)


def _groups(rewards: npt.NDArray[Any], group_ids: Int64) -> Iterator[Int64]:
    """Yield the indices of the scored members of each group with a signal (rewards that differ)."""
    scored = np.flatnonzero(~np.isnan(rewards))
    order, begins = by_group(group_ids[scored])
    members = scored[order]
    if len(members):
        lowest, highest = (f.reduceat(rewards[members], begins[:-1]) for f in (np.minimum, np.maximum))
        for group in np.flatnonzero(lowest < highest):
            yield members[begins[group] : begins[group + 1]]


def _centred(values: Float64, group_ids: Int64) -> Float64:
    """Return R minus the mean of its group; exactly 0 for a group of equal rewards, without rounding errors."""
    centred = np.zeros(len(values))
    for members in _groups(values, group_ids):
        centred[members] = values[members] - _mean(values[members])
    return centred


def _scaled(advantages: Float64, values: Float64, group_ids: Int64, scale: Scale) -> Float32:
    """Return the advantages, divided by the std of ``values`` over the group or the batch, or unscaled."""
    if scale == "group":
        for members in _groups(values, group_ids):
            advantages[members] /= _std(values[members]) + STD_EPSILON
    elif scale == "batch":
        advantages = advantages / (_std(values[~np.isnan(values)]) + STD_EPSILON)
    elif scale != "none":
        raise ValueError(f"scale must be group, batch or none, not {scale!r}")
    return advantages.astype(np.float32)


def _whitened(values: Float64) -> Float64:
    """Return values scaled to mean 0 and std 1 over values that are not NaN; 0 for NaN, and if all are equal."""
    known = values[~np.isnan(values)]
    if not len(known) or known.min() == known.max():
        return np.zeros(len(values))
    return np.nan_to_num((values - _mean(known)) / (_std(known) + STD_EPSILON))


def _mean(values: Float64) -> float:
    return math.fsum(values) / len(values)


def _std(values: Float64) -> float:
    """Return the unbiased standard deviation; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(math.fsum((values - _mean(values)) ** 2) / (len(values) - 1))
