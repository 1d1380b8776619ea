"""Prompt dispatcher: assigns the prompts of a rollout to engine replicas (``--rollout-balancing``)."""

import itertools
from collections.abc import Sequence

import torch.distributed as dist

from megatron_grpo.rollout.engine import Engine

_rollouts = itertools.count()  # equal on all ranks


class PromptDispatcher:
    """Assignment of prompt numbers to this replica.

    *Static* (``capacity`` None): replica r of n starts r, r + n, ... at once, so every run assigns the same prompts.

    *Dynamic*: each replica starts with the prompts of ``capacity`` completions. A replica with fewer running
    completions draws the next prompt. The lead rank of each replica draws from a counter in the process group's store
    and publishes the number in the store. The replica's other ranks reach the same draw after the same completions.
    """

    def __init__(self, engine: Engine, num_prompts: int, num_generations: int, capacity: int | None):
        self.first: Sequence[int] = range(0)
        self._num_generations, self._capacity = num_generations, capacity or 0
        self._remaining: Sequence[int] = range(0)  # shared by all replicas
        self._said: list[str] = []
        rollout = next(_rollouts)
        if engine.replica is None:
            return
        self.first = range(engine.replica, num_prompts, engine.num_replicas)
        if capacity is not None:
            at_once = max(1, capacity // num_generations)
            self.first, self._remaining = self.first[:at_once], range(at_once * engine.num_replicas, num_prompts)
        self._is_lead, self._alone = engine.is_lead, dist.get_world_size() == engine.num_replicas
        self._store = dist.PrefixStore(f"rollout/{rollout}", dist.distributed_c10d._get_default_store())
        self._words = (f"{engine.replica}/{draw}" for draw in itertools.count())

    def further(self, under_way: int) -> list[int]:
        """Return the prompts that this replica starts now, given its number of running completions."""
        taken: list[int] = []
        while self._remaining and under_way + len(taken) * self._num_generations < self._capacity:
            number = self._next_number()
            if number >= len(self._remaining):
                self._remaining = range(0)
            else:
                taken.append(self._remaining[number])
        return taken

    def _next_number(self) -> int:
        """Return the next number of the counter, equal on all ranks of the replica."""
        if self._alone:
            return self._store.add("next", 1) - 1
        word = next(self._words)
        if not self._is_lead:
            return int(self._store.get(word))  # waits for the lead rank
        number = self._store.add("next", 1) - 1
        self._store.set(word, str(number))
        self._said.append(word)
        return number

    def close(self) -> None:
        """Delete the published numbers once every rank is done; one counter per rollout stays in the store."""
        for word in self._said:
            self._store.delete_key(word)
