"""A rollout that ends before all its completions do (``--partial-rollouts``).

A rollout of the longest completion takes as long as this one, although the engine is nearly idle at its end. Here the
engine always has ``--max-staleness`` batches more than the trainer takes. Generation stops when enough groups are
complete (rollout/staleness.py); the next rollout continues the others under the new weights, by new requests with the
prompt and the tokens so far. Every token keeps its log-probability and the version of the weights that sampled it.
With ``--weight-update keep`` the engine goes on with the requests and their keys and values instead.

Groups are scored when they are complete. All decisions follow from the engine's steps, so that a colocated run is
repeatable.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.prompts import draw
from megatron_grpo.data.share import of_completions
from megatron_grpo.rewards.pool import GroupMember, RewardPool
from megatron_grpo.rollout.collect import Needs, everything, exchange, missing_rewards, sample_to_score, to_batch
from megatron_grpo.rollout.engine import Completion, InterruptibleEngine, Request
from megatron_grpo.rollout.ledger.content import BatchRecord
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.rollout.source import Rollout, SourceState, Synced, WholeRollouts
from megatron_grpo.rollout.unfinished import (
    DIRECTORY,
    Group,
    PartialRollouts,
    prompts_of,
)


@dataclass(kw_only=True)
class PartialSource(WholeRollouts):
    """Rollouts that end when the next batch is complete; evaluations are whole rollouts."""

    groups: PartialRollouts

    def plan(self) -> RolloutPlan:
        """See `WholeRollouts.plan`: the prompts are those that start beside the unfinished ones."""
        prompts = draw(self.dataset, self.sampler, self.groups.prompts_to_draw())
        return self.plan_of(prompts, partial=self.groups)

    def collect(self, plan: RolloutPlan, needs: Needs, synced: Synced | None) -> Rollout:
        """See `WholeRollouts.collect`."""
        if synced is None:  # an evaluation
            self.groups.pause(self._engine)
            return super().collect(plan, needs, synced)
        parts = self._engine, plan, self.scorer, self.tokenizer, self.timers
        batch, failures = collect_partial_rollout(*parts, self.watch(), needs)
        return Rollout(batch, staleness_metrics(batch, synced.version, self.args.updates_per_rollout), failures)

    def probe(self) -> Callable[[], RolloutBatch]:
        """See `RolloutSource.probe`."""
        self.groups.pause(self._engine)
        return super().probe()

    @property
    def _engine(self) -> InterruptibleEngine:
        return cast(InterruptibleEngine, self.engine)

    def follow(self, record: BatchRecord) -> None:
        """See `RolloutSource.follow`."""
        super().follow(record)
        assert record.started is not None
        prompt_of = prompts_of(self.dataset)
        self.groups.take_over(record.started, lambda replica: self.replay.unfinished(record.number, replica, prompt_of))

    def state(self) -> SourceState:
        """See `RolloutSource.state`; the lead rank of each replica writes its unfinished groups."""
        groups, unfinished = self.groups, self.groups.state
        position = super().state().position | {"partial": groups.position(unfinished)}
        if not self.engine.is_lead:
            return SourceState(position)
        return SourceState(position, lambda directory: groups.save(directory / DIRECTORY, unfinished))

    def resume(self, position: Mapping[str, Any], unfinished: Callable[[], Path | None]) -> None:
        """See `RolloutSource.resume`."""
        super().resume(position, unfinished)
        if saved := position.get("partial"):
            self.groups.load(unfinished() or Path(self.args.load, DIRECTORY), saved, self.dataset)


def collect_partial_rollout(
    engine: InterruptibleEngine,
    plan: RolloutPlan,
    scorer: RewardPool | None,
    tokenizer,
    timers,
    progress: Callable[[Sequence[Completion], int], None] = lambda completions, under_way: None,
    needs: Needs = everything,
) -> tuple[RolloutBatch, int]:
    """Return the next batch, and the number of missing rewards of the groups that were completed in this rollout.

    ``plan.prompts`` are the new groups (`PartialRollouts.prompts_to_draw`). The batch has the same order on every rank:
    each replica's groups by their numbers, in its places. ``plan.partial`` then has the groups that are not in the
    batch. The other arguments are those of `collect_rollout`.
    """
    partial = plan.partial
    assert partial is not None
    groups, num_generations, recording = partial.with_new(plan.prompts), plan.num_generations, plan.recording
    if recording is not None:
        groups |= recording.ledger.known({number: group for number, group in groups.items() if not group.complete})
    # The id of a request is unique over the run: unfinished completions keep it.
    members = {
        number * num_generations + place: GroupMember(number, place, num_generations)
        for number in sorted(groups)
        for place in range(num_generations)
    }
    finished: list[Completion] = []
    scored: list[int] = []  # ids of completions

    def complete(number: int) -> None:
        """Have a complete group scored, and written."""
        if scorer is not None:
            scored.extend(_submit(scorer, groups[number], members, tokenizer))
            if recording is not None:
                recording.complete(number, groups[number])

    with timers("rollout"), engine.rollout(plan.seed):
        requests = [request for request in _requests(groups, plan) if request.id not in partial.running]
        engine.submit(requests)
        under_way = len(requests) + len(partial.running)
        for number, group in groups.items():  # those that became complete between two rollouts
            if group.complete and group.rewards is None:
                complete(number)
        comes_first = bool(partial.running)  # a step, with what ended with the sync of weights
        taken = None if comes_first else partial.to_take(groups)
        while taken is None:
            assert under_way, "no group is complete, and none is generated"
            newly = engine.poll()
            finished += newly
            under_way -= len(newly)
            for number, group in partial.with_completions(groups, newly).items():
                groups[number] = group
                if group.complete:
                    complete(number)
            if recording is not None:
                recording.append_scored(scorer)
            if newly or comes_first:
                taken, comes_first = partial.to_take(groups), False
            progress(finished, under_way)
        groups |= partial.stop(engine, groups)
    with timers("scoring"):
        if recording is not None:
            recording.append_scored(scorer, wait=True)
        if scorer is not None:
            rewards = scorer.finish(scored)
            for i in range(0, len(scored), num_generations):
                number = scored[i] // num_generations
                groups[number] = replace(groups[number], rewards=rewards[i : i + num_generations])
        mine = [groups[number] for number in taken] if engine.is_lead else []
        completions = [c for group in mine for c in group.completions if c is not None]
        places = {number: partial.replica + i * partial.num_replicas for i, number in enumerate(taken)}
        if recording is not None:
            recording.placed(places, {number: groups[number].birth for number in taken})
        prompts = {number: groups[number].prompt for number in taken}
        batch = to_batch(prompts, completions, members, places, plan.sampling.num_kept)
        if scorer is not None:
            batch.rewards = np.concatenate([rewards[:0], *(group.rewards for group in mine)])
        batch, failures = exchange(batch, needs), missing_rewards(scorer)
    partial.take(groups, taken, len(plan.prompts))
    return batch, failures


def _requests(groups: dict[int, Group], plan: RolloutPlan) -> list[Request]:
    """Return the requests of all completions that are not finished, oldest group first."""
    requests = []
    for number, group in sorted(groups.items()):
        prompt = group.prompt
        for place, begun in enumerate(group.completions):
            if begun is None or begun.finish_reason == "abort":
                own, sampling = number * plan.num_generations + place, prompt.sampling(plan.sampling)
                requests.append(Request(own, prompt.ids, sampling, begun, row=prompt.row, images=prompt.images))
    return requests


def _submit(scorer: RewardPool, group: Group, members: dict[int, Any], tokenizer) -> list[int]:
    """Submit a complete group to the scorer; return the ids of its completions."""
    text, ids = tokenizer.decode(group.prompt.ids), []
    for completion in group.completions:
        assert completion is not None
        sample = sample_to_score(group.prompt, text, completion, tokenizer)
        scorer.submit(completion.id, sample, members[completion.id])
        ids.append(completion.id)
    return ids


def staleness_metrics(batch: RolloutBatch, version: int, updates_per_rollout: int) -> dict[str, float]:
    """Return the staleness of a batch's sampled tokens, counted in syncs, and the share of interrupted completions.

    ``version`` is the newest version of the weights; a sync follows after ``updates_per_rollout`` updates.
    """
    sampled, owner = batch.response_mask == 1, batch.completion_of_tokens
    staleness = (version - batch.weight_version[sampled]) / updates_per_rollout
    largest, interrupted = np.zeros((2, batch.num_completions))
    np.maximum.at(largest, owner[sampled], staleness)
    held = np.flatnonzero(batch.held & (batch.completion_lengths > 0))  # a failed episode can be empty
    first = batch.weight_version[batch.cu_seqlens[held] + batch.prompt_lengths[held]]
    interrupted[held] = first != batch.weight_version[batch.cu_seqlens[held + 1] - 1]
    sums = np.bincount(owner[sampled], staleness, minlength=batch.num_completions)
    sums, largest, interrupted = of_completions(batch, np.stack([sums, largest, interrupted]))
    return {
        "staleness/mean": math.fsum(sums) / max(int(batch.response_lengths.sum()), 1),
        "staleness/max": float(largest.max()),
        "staleness/interrupted": float(interrupted.mean()),
    }
