"""Sources of batches: `setup` chooses one, and nothing else asks how the batches of a run come about.

    RolloutSource   recorded batches alone (--replay-rollouts, --train-only)               here
    WholeRollouts   an engine of the training ranks, or servers: all completions finish    here
    PartialSource   the same engines; the next rollout continues what is unfinished        partial.py
    PlacedSource    engines on ranks of their own, which generate during updates           stream/source.py

`RolloutSource.next` yields the next batch, with its metrics. Every source reads a batch from the ledger if an earlier
attempt of the run has generated it, and records in the ledger what it generates. `state` is what a checkpoint needs,
and `resume` continues from it. A new mode is a subclass with `generate_next`, and what it adds to `state`, `resume` and
`follow`.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.prompts import Prompt, PromptDataset, draw
from megatron_grpo.data.sampler import BlendedSampler, PromptSampler
from megatron_grpo.rewards.pool import RewardPool, print_first_failures
from megatron_grpo.rollout.collect import Needs, check_episodes, collect_rollout, nothing
from megatron_grpo.rollout.draft_counts import metrics_of_all_ranks
from megatron_grpo.rollout.dynamic_sampling import Selection, filter_weights, prompts_to_draw
from megatron_grpo.rollout.engine import Completion, LocalEngine
from megatron_grpo.rollout.episodes import print_failures
from megatron_grpo.rollout.ledger.content import BatchRecord, Content
from megatron_grpo.rollout.ledger.ledger import Ledger, delete_before
from megatron_grpo.rollout.ledger.recording import Recording
from megatron_grpo.rollout.ledger.replay import Replay
from megatron_grpo.rollout.plan import RolloutPlan, rollout_seed, training_sampling
from megatron_grpo.rollout.weight_sync.weight_check import PROMPTS_PER_REPLICA, probe_plan

AfterStep = Callable[[Sequence[Completion], int], None]  # with the finished completions and the number of running ones


@dataclass(frozen=True)
class Synced:
    """The newest sync of weights to the engine."""

    version: int = 0  # of the weights: the trainer's iteration
    metrics: dict[str, float] = field(default_factory=dict)  # of an adapter


@dataclass(frozen=True)
class Rollout:
    """A batch of a source."""

    batch: RolloutBatch
    metrics: dict[str, float]
    reward_failures: int  # missing rewards
    sampled: bool = True  # False: read from a ledger


@dataclass(frozen=True)
class SourceState:
    """State of a source between two rollouts."""

    position: dict[str, Any]  # equal on all ranks, JSON's types
    save: Callable[[Path], None] | None = None  # writes this rank's unfinished groups into a checkpoint's folder


@dataclass(kw_only=True)
class RolloutSource:
    """Recorded batches, and what all sources have in common. All ranks call its methods together."""

    args: Namespace
    dataset: PromptDataset
    sampler: PromptSampler | BlendedSampler
    timers: Callable[[str], AbstractContextManager]
    replay: Replay = field(default_factory=lambda: Replay(Content()))
    ledger: Ledger | None = None  # to record batches in
    taken: int = 0  # batches so far

    generates = False  # whether there is an engine

    @property
    def next_is_recorded(self) -> bool:
        """Whether the next batch is read from a ledger and needs no engine."""
        return self.replay.get(self.taken) is not None

    @property
    def ended(self) -> bool:
        """Whether there is no further batch."""
        return not (self.generates or self.next_is_recorded)

    def next(self, needs: Needs, synced: Synced) -> Rollout:
        """Return the next batch, with the tokens of the completions that this rank ``needs``.

        An engine that generates it holds the weights of ``synced``.
        """
        record = self.replay.get(self.taken)
        self.taken += 1
        if record is None:
            return self.generate_next(needs, synced)
        with self.timers("rollout"):
            batch = self.replay.collect(record, needs)
        self.follow(record)
        return Rollout(batch, record.metrics, record.reward_failures, sampled=False)

    def generate_next(self, needs: Needs, synced: Synced) -> Rollout:
        """Generate and record batch number ``taken - 1``; arguments and result are those of `next`."""
        raise NotImplementedError

    def follow(self, record: BatchRecord) -> None:
        """Go on as after the rollout of a recorded batch."""
        if record.sampler is not None:
            self.sampler.load_state_dict(record.sampler)

    def evaluate(self, plan: RolloutPlan, needs: Needs = nothing) -> RolloutBatch:
        """Return the completions of an evaluation with their rewards, and the tokens of those that this rank needs."""
        raise NotImplementedError

    def probe(self) -> Callable[[], RolloutBatch]:
        """Begin completions of the first prompts of the data by every replica; return the function that returns them.

        They have all tokens and no rewards. Engines on ranks of their own complete them beside other work.
        """
        raise NotImplementedError

    # ---- checkpoints and end

    def state(self) -> SourceState:
        """Return the present state, between two rollouts."""
        return SourceState({"sampler": self.sampler.state_dict(), "rollouts": self.taken})

    def state_if_lost(self) -> Callable[[], SourceState]:
        """Return the function that returns the state to resume from if the engine is lost in the next rollout."""
        before = self.state()
        return lambda: before

    def resume(self, position: Mapping[str, Any], unfinished: Callable[[], Path | None]) -> None:
        """Continue from the position of a checkpoint. Collective.

        ``unfinished`` returns the checkpoint's folder of unfinished groups, or None.
        """
        self.sampler.load_state_dict(position["sampler"])
        self.taken = position.get("rollouts", 0)

    def after_save(self, oldest: int | None) -> None:
        """Begin new files of a ledger; delete those that no resume at batch ``oldest`` or later needs (None: keep)."""
        if self.ledger is not None:
            self.ledger.roll()
            if oldest is not None:
                delete_before(self.ledger.directory, oldest, self.args.max_staleness)

    def free_device(self) -> None:
        """Free what a lost engine holds on this device; groups that a checkpoint needs stay."""

    def close(self) -> None:
        """Close the ledger."""
        if self.ledger is not None:
            self.ledger.close()


@dataclass(kw_only=True)
class WholeRollouts(RolloutSource):
    """Rollouts of an engine that generates while the trainer waits, until all their completions have finished.

    With --dynamic-sample and --over-sampling-ratio a rollout starts more groups than it needs and keeps some.
    """

    engine: LocalEngine
    scorer: RewardPool | None  # on the lead rank of each replica
    tokenizer: Any
    watch: Callable[[], AfterStep]  # called at the start of a rollout
    failed_rewards: set[str] = field(default_factory=set)  # functions with a failure that was printed

    generates = True

    def generate_next(self, needs: Needs, synced: Synced) -> Rollout:
        """See `RolloutSource.generate_next`. Prompts without a kept group return to the sampler."""
        plan = self.plan()
        rollout = self.sample(plan, needs, synced)
        rollout = replace(rollout, metrics=rollout.metrics | synced.metrics)
        if plan.recording is not None:
            with self.timers("ledger"):
                results = rollout.metrics, rollout.reward_failures, plan.sampling.num_kept
                plan.recording.close(self.sampler.state_dict(), *results, plan.partial)
        return rollout

    def plan(self) -> RolloutPlan:
        """Draw the prompts of the next rollout and return its plan, which is equal on all ranks."""
        args, selection = self.args, None
        num_groups = args.generation_batch_size // args.num_generations
        ratio, resample_times = args.over_sampling_ratio, args.max_resample_times if args.dynamic_sample else 0
        prompts = draw(self.dataset, self.sampler, prompts_to_draw(num_groups, ratio, resample_times))
        if args.dynamic_sample or ratio > 1:
            rules = num_groups, args.num_generations, ratio, resample_times
            selection = Selection(self.engine, *rules, self.scorer, filter_weights(args))
        return self.plan_of(prompts, selection=selection)

    def plan_of(self, prompts: Sequence[Prompt], **more: Any) -> RolloutPlan:
        """Return the plan of a rollout of ``prompts``; ``more``: fields of `RolloutPlan`."""
        args, recording = self.args, None if self.ledger is None else Recording(self.ledger, self.taken - 1)
        sampling, seed = training_sampling(args, self.taken), rollout_seed(args.seed, self.taken)
        return RolloutPlan(prompts, args.num_generations, sampling, seed, recording=recording, **more)

    def sample(self, plan: RolloutPlan, needs: Needs, synced: Synced | None = None) -> Rollout:
        """Return the rollout of a plan; print the first failure of each reward function."""
        rollout = self.collect(plan, needs, synced)
        metrics = rollout.metrics
        if plan.selection is not None:
            unused, metrics = plan.selection.close()
            self.sampler.give_back([plan.prompts[number].id for number in unused])
        drafts = metrics_of_all_ranks(self.engine.drafts if self.engine.is_lead else None)
        failed_episodes = print_failures(self.engine)
        if self.scorer is not None:
            print_first_failures(self.scorer.failures, self.failed_rewards)
        check_episodes(rollout.batch, failed_episodes)
        return replace(rollout, metrics=metrics | drafts)

    def collect(self, plan: RolloutPlan, needs: Needs, synced: Synced | None) -> Rollout:
        """Generate and score the completions of a plan."""
        capacity = self.args.vllm_max_num_seqs if self.args.rollout_balancing == "dynamic" else None
        parts = self.engine, plan, self.scorer, self.tokenizer, self.timers
        batch, failures = collect_rollout(*parts, capacity, self.watch(), needs)
        return Rollout(batch, {}, failures)

    def evaluate(self, plan: RolloutPlan, needs: Needs = nothing) -> RolloutBatch:
        """See `RolloutSource.evaluate`."""
        return self.sample(plan, needs).batch

    def probe(self) -> Callable[[], RolloutBatch]:
        """See `RolloutSource.probe`."""
        plan = probe_plan(self.args, self.dataset.first(PROMPTS_PER_REPLICA), self.engine.num_replicas)
        batch, _ = collect_rollout(self.engine, plan, None, self.tokenizer, self.timers)
        print_failures(self.engine, "probe of the weights: ")
        return lambda: batch

    def free_device(self) -> None:
        """See `RolloutSource.free_device`: end the engine."""
        self.engine.close()

    def close(self) -> None:
        """Close the scorer and the ledger."""
        if self.scorer is not None:
            self.scorer.close()
        super().close()
