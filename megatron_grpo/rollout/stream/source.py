"""Batches of engines on ranks of their own: the trainer takes what they have finished (stream/__init__.py)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.rollout.collect import Needs, check_episodes, everything, nothing
from megatron_grpo.rollout.ledger.content import BatchRecord
from megatron_grpo.rollout.partial import staleness_metrics
from megatron_grpo.rollout.plan import RolloutPlan, training_sampling
from megatron_grpo.rollout.source import Rollout, RolloutSource, SourceState, Synced
from megatron_grpo.rollout.stream.placed import PlacedEngines
from megatron_grpo.rollout.unfinished import DIRECTORY
from megatron_grpo.rollout.weight_sync.weight_check import PROMPTS_PER_REPLICA, probe_plan
from megatron_grpo.utils.errors import GrpoError


@dataclass(kw_only=True)
class PlacedSource(RolloutSource):
    """Batches of `PlacedEngines`, which draw their prompts themselves and go on between two batches."""

    engine: PlacedEngines

    generates = True

    def generate_next(self, needs: Needs, synced: Synced) -> Rollout:
        """See `RolloutSource.generate_next`."""
        engine = self.engine
        with self.timers("rollout"):
            batch, failures, metrics = engine.take(needs)
            metrics |= staleness_metrics(batch, synced.version, self.args.updates_per_rollout)
        check_episodes(batch)
        if self.ledger is not None:
            with self.timers("ledger"):
                started, taken = engine.position(), engine.taken
                if taken is not None:
                    num_kept = training_sampling(self.args, self.taken).num_kept
                    rest = started["sampler"], metrics, failures, num_kept, started["stream"]
                    self.ledger.record(BatchRecord(self.taken - 1, taken, *rest))
        return Rollout(batch, metrics | synced.metrics, failures)

    def follow(self, record: BatchRecord) -> None:
        """See `RolloutSource.follow`."""
        super().follow(record)
        assert record.started is not None
        self.engine.restore(record.started)

    def evaluate(self, plan: RolloutPlan, needs: Needs = nothing) -> RolloutBatch:
        """See `RolloutSource.evaluate`."""
        with self.timers("rollout"):
            batch, _ = self.engine.begin(plan, needs, data="valid", scored=True)()
        check_episodes(batch)
        return batch

    def probe(self) -> Callable[[], RolloutBatch]:
        """See `RolloutSource.probe`."""
        plan = probe_plan(self.args, self.dataset.first(PROMPTS_PER_REPLICA), self.engine.num_replicas)
        finish = self.engine.begin(plan, everything, data="train", scored=False)
        return lambda: finish()[0]

    def state(self) -> SourceState:
        """See `RolloutSource.state`; the engine ranks write their groups at a command of rank 0."""
        save = lambda directory: self.engine.save(directory / DIRECTORY)  # noqa: E731
        return SourceState(self.engine.position(), save if dist.get_rank() == 0 else None)

    def state_if_lost(self) -> Callable[[], SourceState]:
        """See `RolloutSource.state_if_lost`: the present state, because the engines go on and have groups to save."""
        return self.state

    def resume(self, position: Mapping[str, Any], unfinished: Callable[[], Path | None]) -> None:
        """See `RolloutSource.resume`."""
        super().resume(position, unfinished)
        directory = unfinished()
        if directory is None:
            raise GrpoError(
                f"{self.args.load} lacks the unfinished completions ({DIRECTORY}/): load only the weights with "
                "--finetune"
            )
        self.engine.restore(position["stream"], directory)
