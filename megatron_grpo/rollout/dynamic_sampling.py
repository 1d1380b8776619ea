"""Selection of the groups of a rollout that starts more groups than it needs.

    --dynamic-sample          a new prompt replaces a group whose rewards (`filter_reward`) are all equal
    --over-sampling-ratio R   start R times the prompts; keep the groups that complete first

Each replica selects within its own share of the rollout and never waits for another replica. Prompts without a kept
group return to the sampler.
"""

import itertools
import math
from argparse import Namespace
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.algorithm.advantages import combine_rewards
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rollout.engine import Engine

# Engine steps between the end of a group and the decision about it, during which its rewards are computed. The number
# is fixed so that a replacement starts after the same step in every run, however fast the rewards are.
STEPS_TO_SCORE = 16

_rollouts = itertools.count()  # equal on all ranks
_RETURNED, _KEPT, _REPLACED = range(3)


def has_signal(rewards: np.ndarray) -> bool:
    """Return whether the rewards ``[n]`` of a group (nan: not scored) differ; if not, all advantages are 0."""
    scored = rewards[~np.isnan(rewards)]
    return len(scored) > 1 and bool(scored.min() < scored.max())


# Rewards that differ between wrong answers, too, without one being better than another.
PENALTIES = frozenset(("soft_overlong", "repetition"))


def filter_weights(args: Namespace) -> list[float | None]:
    """Return the weight of each function of --reward-funcs in the reward that decides about a group; None: left out.

    The functions are those of --dynamic-sample-reward (a weight of 0 then counts as 1), by default all with a weight
    except `PENALTIES`, or also these if there is no other; all if none has a weight.
    """
    named = args.dynamic_sample_reward
    weights = list(zip(args.reward_funcs, args.reward_weights, strict=True))
    weighted = [name for name, weight in weights if weight] or args.reward_funcs
    chosen = named or [name for name in weighted if name not in PENALTIES] or weighted
    return [(weight or (1.0 if named else 0.0)) if name in chosen else None for name, weight in weights]


def filter_reward(rewards: np.ndarray, weights: Sequence[float | None]) -> np.ndarray:
    """Return the reward ``[n]`` that decides about a group, from its rewards ``[n, f]`` and `filter_weights`.

    A group in which no function with a weight scored anything, by --reward-routing, has no such reward: nan.
    """
    columns = [column for column, weight in enumerate(weights) if weight is not None]
    return combine_rewards(rewards[:, columns], [weight for weight in weights if weight is not None])


def prompts_to_draw(num_groups: int, over_sampling_ratio: float, max_resample_times: int) -> int:
    """Return how many prompts a rollout of ``num_groups`` can start at most: first round plus replacements."""
    return _first_round_size(num_groups, over_sampling_ratio) + max_resample_times * num_groups


def _first_round_size(num_groups: int, over_sampling_ratio: float) -> int:
    return math.ceil(round(num_groups * over_sampling_ratio, 6))  # 1.1 x 10 is 11, without rounding errors


class Selection:
    """Selection of ``num_groups`` groups of one rollout among the prompts drawn for it (`prompts_to_draw`).

    Replica r of n starts the prompts r, r + n, ... of the first round. A group is decided when it is complete, or
    `STEPS_TO_SCORE` steps later if ``max_resample_times`` is above 0. Replace a group without signal by the replica's
    next new prompt if the quota would be missed and its chain has had fewer than ``max_resample_times`` replacements.
    When the quota is reached, abort everything else. When nothing is left to generate, fill the quota with groups
    without signal.

    All ranks of a replica make the same decisions: all receive the completions, and the lead rank publishes the groups
    with signal.
    """

    def __init__(
        self,
        engine: Engine,
        num_groups: int,
        num_generations: int,
        over_sampling_ratio: float = 1.0,
        max_resample_times: int = 0,
        scorer: RewardPool | None = None,
        filter_weights: Sequence[float | None] = (),
    ):
        self._num_generations, self._rounds = num_generations, max_resample_times
        self._scorer, self._filter_weights = scorer, filter_weights
        self._num_first = _first_round_size(num_groups, over_sampling_ratio)
        self._num_prompts = prompts_to_draw(num_groups, over_sampling_ratio, max_resample_times)
        self._replica, self._replicas = engine.replica, engine.num_replicas
        self._is_lead = engine.is_lead
        # A rank that generates nothing has an empty share.
        share = range(num_groups)[engine.replica :: engine.num_replicas] if engine.replica is not None else range(0)
        self.first: Sequence[int] = range(self._num_first)[engine.replica :: engine.num_replicas] if share else []
        self._quota = len(share)
        self._fresh = deque(self._num_first + k * num_groups + place for k in range(self._rounds) for place in share)
        self._round = dict.fromkeys(self.first, 0)  # replacement round of each started group
        self._complete: dict[int, list[int]] = {}  # ids of each group's completions
        self._undecided: deque[tuple[int, int]] = deque()  # (group, the step at which it is decided)
        self._decided = 0
        self._kept: list[int] = []
        self._without_signal: list[int] = []
        self._step = 0
        self._alone = dist.get_world_size() == engine.num_replicas
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"selection/{next(_rollouts)}/{engine.replica}", store)
        self._said: list[str] = []

    def take(self, number: int, group: int) -> None:
        """Record completion ``number`` of a group, which was submitted to the scorer."""
        complete = self._complete.setdefault(group, [])
        complete.append(number)
        if len(complete) == self._num_generations:
            self._undecided.append((group, self._step + (STEPS_TO_SCORE if self._rounds else 0)))

    def further(self, under_way: int) -> list[int] | None:
        """Return the prompts to start after this engine step; None when the quota is reached."""
        begun: list[int] = []
        while self._undecided and (self._undecided[0][1] <= self._step or not (under_way or begun)):
            group, _ = self._undecided.popleft()
            self._decided += 1
            if self._rounds and not self._has_signal(group):
                self._without_signal.append(group)
                short = len(self._kept) + len(self._round) - self._decided < self._quota
                if short and self._round[group] < self._rounds:
                    begun.append(self._fresh.popleft())
                    self._round[begun[-1]] = self._round[group] + 1
                continue
            self._kept.append(group)
            if len(self._kept) == self._quota:
                return None
        self._step += 1
        return begun

    def _has_signal(self, group: int) -> bool:
        """Return whether the group has signal; the lead rank decides from the rewards and publishes it in the store."""
        word = str(group)
        if not self._is_lead:
            return self._store.get(word) == b"1"  # waits for the lead rank
        assert self._scorer is not None
        answer = has_signal(filter_reward(self._scorer.wait(self._complete[group]), self._filter_weights))
        if not self._alone:
            self._store.set(word, "1" if answer else "0")
            self._said.append(word)
        return answer

    def places(self) -> dict[int, int]:
        """Return {group: place in the rollout} of the groups that this replica keeps; call it after generation."""
        if self._replica is None:
            return {}
        filled = self._kept + self._without_signal[: self._quota - len(self._kept)]
        return {group: self._replica + i * self._replicas for i, group in enumerate(sorted(filled))}

    def close(self) -> tuple[list[int], dict[str, float]]:
        """Return the numbers of the unused prompts, and the metrics. Collective."""
        status = torch.zeros(2, self._num_prompts, dtype=torch.int64)
        if self._is_lead:
            kept = self.places()
            for group in [*self._kept, *self._without_signal]:
                status[0, group] = _KEPT if group in kept else _REPLACED
            for group, number in self._round.items():
                status[1, group] = number + 1
        dist.all_reduce(status, group=host_group())  # each number has one writer
        for word in self._said:
            self._store.delete_key(word)
        what, begun = status
        unused = torch.nonzero(what == _RETURNED).flatten().tolist()
        metrics: dict[str, float] = {
            "sampling/resampled_groups": int((what == _REPLACED).sum()),
            "sampling/rounds": max(int(begun.max()) - 1, 0),
            "sampling/aborted_groups": int(((what == _RETURNED) & (begun > 0)).sum()),
        }
        return unused, metrics
