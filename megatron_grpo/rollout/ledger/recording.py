"""One rollout and the ledger: the groups that it finds there, and those that it appends."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.parallel.agreement import gathered
from megatron_grpo.rewards.pool import GroupMember, RewardPool
from megatron_grpo.rollout.engine import Completion, Request, Submits
from megatron_grpo.rollout.ledger.content import BatchRecord, GroupKey
from megatron_grpo.rollout.ledger.ledger import Ledger
from megatron_grpo.rollout.unfinished import Group, PartialRollouts


class Recording:
    """The rollout for batch number ``batch``, on one rank."""

    def __init__(self, ledger: Ledger, batch: int):
        self.ledger, self._batch = ledger, batch
        self._begun: dict[int, Group] = {}  # groups of which some completions are finished
        self._waiting: list[tuple[int, Group]] = []  # complete groups that are being scored
        self._places: dict[int, GroupKey] = {}  # of this replica's groups in the batch

    def known_of(self, prompts: Sequence[Prompt], num_generations: int) -> dict[int, Group]:
        """Return the known groups of a rollout that finishes every group that it starts."""
        return self.ledger.known(
            {n: Group(prompt, self._batch, (None,) * num_generations) for n, prompt in enumerate(prompts)}
        )

    def take(self, completion: Completion, member: GroupMember, prompt: Prompt) -> None:
        """Take a completion that was submitted to the scorer, of a group that began in this rollout."""
        number = member.group
        group = self._begun.get(number) or Group(prompt, self._batch, (None,) * member.size)
        completions = [*group.completions]
        completions[member.place] = completion
        self._begun[number] = group = replace(group, completions=tuple(completions))
        if group.complete:
            self.complete(number, self._begun.pop(number))

    def complete(self, number: int, group: Group) -> None:
        """Take a complete group, whose completions were submitted to the scorer under their ids."""
        if self.ledger.appends:
            self._waiting.append((number, group))

    def append_scored(self, scorer: RewardPool | None, wait: bool = False) -> None:
        """Append the groups that are scored; with ``wait`` all that are complete. Call it after every engine step."""
        if not self._waiting or scorer is None:
            return
        scorer.poll()
        scored, waiting = {}, []
        for number, group in self._waiting:
            ids = [completion.id for completion in group.completions if completion is not None]
            if wait or scorer.scored(ids):
                scored[number] = replace(group, rewards=scorer.wait(ids))
            else:
                waiting.append((number, group))
        self._waiting = waiting
        if scored:
            self.ledger.append(self._batch, scored)

    def placed(self, places: Mapping[int, int], births: Mapping[int, int] | None = None) -> None:
        """Take the places in the batch of this replica's groups, by their numbers."""
        births = births or {}
        self._places = {place: GroupKey(births.get(n, self._batch), n) for n, place in places.items()}

    def close(
        self,
        sampler: dict[str, Any],
        metrics: dict[str, float],
        reward_failures: int,
        num_kept: int,
        partial: PartialRollouts | None,
    ) -> None:
        """Record the batch; on return its groups and rank 0's record of it are on the disk. Collective.

        The arguments are those of `BatchRecord`; ``partial``: the groups of the run, after the batch was taken.
        """
        ledger = self.ledger
        if partial is not None and ledger.appends:
            ledger.append_unfinished(self._batch, partial.replica, partial.state.groups)
        ledger.flush()
        mine = sorted(self._places.items()) if ledger.appends else []
        lost = ledger.has_lost(self._places.values())
        everywhere = gathered((mine, lost))
        keys = tuple(key for _, key in sorted(item for items, _ in everywhere for item in items))
        if not any(lost for _, lost in everywhere):
            position = None if partial is None else partial.position(partial.state)
            ledger.record(BatchRecord(self._batch, keys, sampler, metrics, reward_failures, num_kept, position))


class KnownFirst:
    """An engine that returns known completions at its next step, without generating them."""

    def __init__(self, engine: Submits, groups: Iterable[Group]):
        self._engine = engine
        self._known = {c.id: c for group in groups for c in group.completions if c is not None}
        self._ready: list[Completion] = []
        self._running: set[int] = set()

    def submit(self, requests: Iterable[Request]) -> None:
        """See `Submits.submit`."""
        requests = list(requests)
        self._ready += [self._known[request.id] for request in requests if request.id in self._known]
        others = [request for request in requests if request.id not in self._known]
        self._running |= {request.id for request in others}
        self._engine.submit(others)

    def poll(self) -> list[Completion]:
        """See `Submits.poll`."""
        ready, self._ready = self._ready, []
        done = self._engine.poll() if self._running else []
        self._running -= {completion.id for completion in done}
        return ready + done

    def abort(self, ids: Iterable[int]) -> None:
        """See `Submits.abort`."""
        self._engine.abort([number for number in ids if number in self._running])
