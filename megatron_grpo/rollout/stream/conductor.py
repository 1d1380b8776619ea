"""Conductor: which groups start, on which engine replica, and which ones the trainer takes (rollout/staleness.py).

It has no process group, no store and no clock: tests drive it with made-up engines.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_grpo.rollout.staleness import groups_to_start, groups_to_take


@dataclass
class OpenGroup:
    """A group that has started and is not taken."""

    number: int  # in the order of the starts
    row: int  # of the training data
    birth: int  # version at the start
    replica: int
    complete: bool = False  # and scored


class Conductor:
    """The open groups of a run, counted over all engine replicas.

    The version is the number of batches that the trainer has taken; all replicas hold the weights of this version when
    groups start. A complete group without signal can be replaced: it is dropped, and another one may start, at most
    ``max_replaced`` times for a batch.
    """

    def __init__(self, num_groups: int, max_staleness: int, num_replicas: int, max_replaced: int = 0):
        self.num_groups, self.max_staleness = num_groups, max_staleness
        self.num_replicas, self.max_replaced = num_replicas, max_replaced
        self.version = self.started = self.replaced = 0
        self.replaced_since = 0  # the last batch
        self.open: dict[int, OpenGroup] = {}

    def to_start(self) -> int:
        """Return how many groups may start now."""
        return groups_to_start(self.started - self.replaced, self.version, self.num_groups, self.max_staleness)

    def start(self, rows: Sequence[int]) -> dict[int, list[OpenGroup]]:
        """Start a group of each row; return the new groups of each replica. The one with least work gets the next."""
        assert len(rows) <= self.to_start()
        working = Counter(group.replica for group in self.open.values() if not group.complete)
        new: dict[int, list[OpenGroup]] = {}
        for row in rows:
            replica = min(range(self.num_replicas), key=lambda replica: working[replica])
            working[replica] += 1
            group = self.open[self.started] = OpenGroup(self.started, row, self.version, replica)
            new.setdefault(replica, []).append(group)
            self.started += 1
        return new

    def finish(self, number: int, has_signal: bool = True) -> bool:
        """Record that a group is complete and scored; return whether it is dropped, for want of a signal."""
        if not has_signal and self.replaced_since < self.max_replaced:
            del self.open[number]
            self.replaced += 1
            self.replaced_since += 1
            return True
        self.open[number].complete = True
        return False

    def take(self) -> list[OpenGroup] | None:
        """Return the groups of the next batch and count it; None while the engines have to generate further."""
        births = {number: group.birth for number, group in self.open.items()}
        complete = {number for number, group in self.open.items() if group.complete}
        numbers = groups_to_take(births, complete, self.version, self.num_groups, self.max_staleness)
        if numbers is None:
            return None
        self.version += 1
        self.replaced_since = 0
        return [self.open.pop(number) for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        names = "num_groups max_staleness num_replicas version started replaced replaced_since".split()
        return {name: getattr(self, name) for name in names} | {"open": [asdict(g) for g in self.open.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the state of a checkpoint; groups count as complete when their replica announces them again.

        If there were other replicas, the groups are dealt out anew.
        """
        for name in ("version", "started", "replaced", "replaced_since"):
            setattr(self, name, state[name])
        groups: Collection[dict[str, Any]] = state["open"]
        before = {number: group.replica for number, group in self.open.items()}  # these have what is begun
        self.open = {group["number"]: OpenGroup(**group | {"complete": False}) for group in groups}
        for number, group in self.open.items():
            if state["num_replicas"] != self.num_replicas:
                group.replica = number % self.num_replicas
            group.replica = before.get(number, group.replica)
