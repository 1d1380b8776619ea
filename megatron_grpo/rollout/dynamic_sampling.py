"""Which groups of a rollout are kept, when more are made than it needs.

    --dynamic-sample          a group whose rewards are all alike teaches nothing: a fresh prompt takes its place
    --over-sampling-ratio R   R times the prompts are begun; the first groups that are complete are kept

Each replica has its share of the rollout and chooses within it, so no replica waits for another. What was begun in vain
or not at all is given back to the sampler.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.algorithm.advantages import combine_rewards
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rollout.engine import Completion, Engine

# Steps of the engine between a group's end and the decision about it: its rewards are computed meanwhile. A fixed
# number, so that a replacement joins after the same step in every run, however fast the rewards come.
STEPS_TO_SCORE = 16

_rollouts = itertools.count()  # every rank counts them alike
_RETURNED, _KEPT, _REPLACED = range(3)


def has_signal(rewards: np.ndarray) -> bool:
    """Whether a group's combined rewards ``[n]`` (nan: not scored) differ, so that its advantages are not all 0."""
    scored = rewards[~np.isnan(rewards)]
    return len(scored) > 1 and bool(scored.min() < scored.max())


def prompts_to_draw(num_groups: int, over_sampling_ratio: float, max_resample_times: int) -> int:
    """Prompts that a rollout of ``num_groups`` may begin at most: those of the first round, and every replacement."""
    return _first_round(num_groups, over_sampling_ratio) + max_resample_times * num_groups


def _first_round(num_groups: int, over_sampling_ratio: float) -> int:
    return math.ceil(round(num_groups * over_sampling_ratio, 6))  # 1.1 x 10 is 11, whatever floats say


class Selection:
    """One rollout's choice of ``num_groups`` groups among those of the prompts drawn for it (`prompts_to_draw`).

    The r-th of n replicas begins the prompts r, r + n, ... of the first round. A group is decided when it is complete,
    with ``max_resample_times`` above 0 `STEPS_TO_SCORE` steps later: without a signal it is replaced by the replica's
    next fresh prompt, if without that too few would be kept, and unless it has come by so many replacements itself.
    When the replica has its share, all else is aborted; when nothing is left to be made, groups without a signal fill
    the share up.

    All ranks of a replica come to the same decisions: of completions they all hear, of rewards the lead tells them.
    """

    def __init__(
        self,
        engine: Engine,
        num_groups: int,
        num_generations: int,
        over_sampling_ratio: float = 1.0,
        max_resample_times: int = 0,
        scorer: RewardPool | None = None,
        reward_weights: Sequence[float] = (),
    ):
        self._num_generations, self._rounds = num_generations, max_resample_times
        self._scorer, self._reward_weights = scorer, reward_weights
        self._num_first = _first_round(num_groups, over_sampling_ratio)
        self._num_prompts = prompts_to_draw(num_groups, over_sampling_ratio, max_resample_times)
        self._replica, self._replicas = engine.replica, engine.num_replicas
        self._is_lead = engine.is_lead
        # A rank that makes no completions has a share of none.
        share = range(num_groups)[engine.replica :: engine.num_replicas] if engine.replica is not None else range(0)
        self.first: Sequence[int] = range(self._num_first)[engine.replica :: engine.num_replicas] if share else []
        self._quota = len(share)
        self._fresh = deque(self._num_first + k * num_groups + place for k in range(self._rounds) for place in share)
        self._round = dict.fromkeys(self.first, 0)  # of every group that was begun
        self._complete: dict[int, int] = {}  # completions of each group
        self._undecided: deque[tuple[int, int]] = deque()  # (group, the step at which it is decided)
        self._decided = 0
        self._kept: list[int] = []
        self._alike: list[int] = []
        self._step = 0
        self._alone = dist.get_world_size() == engine.num_replicas
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"selection/{next(_rollouts)}/{engine.replica}", store)
        self._said: list[str] = []

    def take(self, completion: Completion) -> None:
        """Note a completion, which the scorer has been given."""
        group = completion.id // self._num_generations
        self._complete[group] = self._complete.get(group, 0) + 1
        if self._complete[group] == self._num_generations:
            self._undecided.append((group, self._step + (STEPS_TO_SCORE if self._rounds else 0)))

    def further(self, under_way: int) -> list[int] | None:
        """The prompts to begin now, after a step of the engine; None when the share is complete."""
        begun: list[int] = []
        while self._undecided and (self._undecided[0][1] <= self._step or not (under_way or begun)):
            group, _ = self._undecided.popleft()
            self._decided += 1
            if self._rounds and not self._learns_from(group):
                self._alike.append(group)
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

    def _learns_from(self, group: int) -> bool:
        """Whether the group has a signal: the lead's rewards say so, to all ranks of the replica."""
        word = str(group)
        if not self._is_lead:
            return self._store.get(word) == b"1"  # waits for it
        assert self._scorer is not None
        ids = range(group * self._num_generations, (group + 1) * self._num_generations)
        answer = has_signal(combine_rewards(self._scorer.wait(ids), self._reward_weights))
        if not self._alone:
            self._store.set(word, "1" if answer else "0")
            self._said.append(word)
        return answer

    def places(self) -> dict[int, int]:
        """{group: its place in the rollout} of the groups that this replica keeps, when it has made them."""
        filled = self._kept + self._alike[: self._quota - len(self._kept)]
        return {group: self._replica + i * self._replicas for i, group in enumerate(sorted(filled))}

    def close(self) -> tuple[list[int], dict[str, float]]:
        """The prompts, by number, that nothing was made of, and the metrics; every rank must call it."""
        status = torch.zeros(2, self._num_prompts, dtype=torch.int64)
        if self._is_lead:
            kept = self.places()
            for group in [*self._kept, *self._alike]:
                status[0, group] = _KEPT if group in kept else _REPLACED
            for group, number in self._round.items():
                status[1, group] = number + 1
        dist.all_reduce(status, group=host_group())  # each number has one writer
        for word in self._said:
            self._store.delete_key(word)
        what, begun = status
        unused = torch.nonzero(what == _RETURNED).flatten().tolist()
        metrics = {
            "sampling/resampled_groups": int((what == _REPLACED).sum()),
            "sampling/rounds": max(int(begun.max()) - 1, 0),
            "sampling/aborted_groups": int(((what == _RETURNED) & (begun > 0)).sum()),
        }
        return unused, metrics
