"""The parts of a run (model, engine, data, rewards, logs) and its position."""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_grpo.algorithm.advantages import group_statistics
from megatron_grpo.algorithm.arguments import may_need_scores, needs_old_log_probs
from megatron_grpo.checkpointing import checkpoint, checkpoint_directory
from megatron_grpo.checkpointing.background import BackgroundSaves
from megatron_grpo.checkpointing.checkpoint_directory import newest_in_words
from megatron_grpo.checkpointing.run_lock import RunLock
from megatron_grpo.data.batch import Bool, FinishReason, Int64, RolloutBatch
from megatron_grpo.data.pack import shared_tokens
from megatron_grpo.data.prompts import Prompt, PromptDataset, draw
from megatron_grpo.data.sampler import BlendedSampler, PromptSampler
from megatron_grpo.data.share import of_completions, with_tokens_of
from megatron_grpo.estimate.throughput import ModelFlops, TowerFlops
from megatron_grpo.lora.files import save_adapter
from megatron_grpo.lora.stream import merged_shards, stream_merged
from megatron_grpo.models import forward
from megatron_grpo.observability.completion_log import chosen, completion_row
from megatron_grpo.observability.metrics import MetricsLogger, Timers
from megatron_grpo.observability.profiling import Profiler
from megatron_grpo.observability.provenance import write_run_record
from megatron_grpo.observability.watchdog import Watchdog
from megatron_grpo.parallel.agreement import all_ranks_agree, device_answers, on_rank_0
from megatron_grpo.parallel.initialize import print_rank_0
from megatron_grpo.reference.reference_model import BaseReference, ReferenceModel, SwappedReference
from megatron_grpo.reference.teacher_server import TeacherServer
from megatron_grpo.rewards.pool import RewardPool, print_first_failures
from megatron_grpo.rollout.arguments import has_servers
from megatron_grpo.rollout.collect import Needs, check_episodes, collect_rollout, everything, shown_images, with_images
from megatron_grpo.rollout.draft_counts import metrics_of_all_ranks
from megatron_grpo.rollout.dynamic_sampling import Selection, filter_weights, prompts_to_draw
from megatron_grpo.rollout.engine import Completion, Engine
from megatron_grpo.rollout.episodes import Conversing
from megatron_grpo.rollout.ledger.content import BatchRecord
from megatron_grpo.rollout.ledger.ledger import Ledger, delete_before
from megatron_grpo.rollout.ledger.recording import Recording
from megatron_grpo.rollout.ledger.replay import Replay
from megatron_grpo.rollout.partial import collect_partial_rollout, staleness_metrics
from megatron_grpo.rollout.plan import RolloutPlan, rollout_seed, training_sampling
from megatron_grpo.rollout.unfinished import DIRECTORY, PartialRollouts, Unfinished, prompts_of
from megatron_grpo.rollout.weight_sync import weight_check
from megatron_grpo.rollout.weight_sync.adapter_sync import probe_adapter, sync_adapter
from megatron_grpo.training import train_step
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.training.device_memory import DeviceMemory
from megatron_grpo.training.early_exit import EarlyExit, unmark
from megatron_grpo.training.offload import Offloader, needed_by_engine
from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import EngineLost, GrpoError, Preempted
from megatron_grpo.vision.images import ImageStore
from megatron_grpo.weights import hf
from megatron_grpo.weights.stream import stream_hf

Divide = Callable[[int], list[np.ndarray]]  # from their number to the completions of each update


def text_flops(args: argparse.Namespace, flops: ModelFlops, batch: RolloutBatch, completions: Int64) -> float:
    """Return the TFLOP of an update with these completions, images apart; --share-prompts computes a prompt once."""
    found = flops.update(batch.lengths[completions], batch.response_lengths[completions])
    if args.share_prompts:
        shared = shared_tokens(batch.prompt_lengths[completions], batch.group_ids[completions])
        found -= flops.update(shared, np.zeros_like(shared))
    return found


@dataclass
class Trainer:
    """Parts of a run and its position; ``pretrain_grpo.train`` is the algorithm that uses them."""

    args: object
    model: forward.Model
    forward_step: Callable  # pretrain_grpo.forward_step, for forward passes
    optimizer: object
    scheduler: object
    reference: ReferenceModel | SwappedReference | BaseReference | None
    state_offloader: Offloader  # of gradients and optimizer state
    weight_offloader: Offloader
    engine: Engine
    tokenizer: object
    dataset: PromptDataset
    sampler: PromptSampler | BlendedSampler
    valid_prompts: list[Prompt]
    scorer: RewardPool | None
    logger: MetricsLogger
    timers: Timers
    device_memory: DeviceMemory
    profiler: Profiler
    early_exit: EarlyExit
    watchdog: Watchdog | None = None
    bad_updates: BadUpdates = field(default_factory=lambda: BadUpdates("stop", None, None))
    left_early: str | None = None  # the reason, if the run ends before its last update
    save_lock: RunLock | None = None  # of rank 0, with --save
    background_saves: BackgroundSaves | None = None  # with --async-save
    teacher: ReferenceModel | TeacherServer | None = None
    images: ImageStore | None = None  # of a vision-language model
    partial: PartialRollouts | None = None  # with --partial-rollouts
    ledger: Ledger | None = None  # with --ledger
    replay: Replay | None = None  # batches that are recorded
    iteration: int = 0
    synced_iteration: int = 0  # version of the engine's weights
    first_iteration: int = 0  # at the start of this process: above 0 after a resume
    rollouts: int = 0
    tokens: int = 0
    reward_failures: int = 0  # in the newest rollout
    memory: dict[str, float] = field(default_factory=dict)  # of the stages of the newest rollout
    sampling_metrics: dict[str, float] = field(default_factory=dict)  # of the newest rollout
    sync_metrics: dict[str, float] = field(default_factory=dict)  # of the newest sync of an adapter
    episode_flops: npt.NDArray[np.float64] | None = None  # [n] TFLOP in the tower, where environments show images
    adapter_probed: bool = False
    failed_rewards: set[str] = field(default_factory=set)
    started: float = field(default_factory=time.monotonic)

    # ---- log-probabilities

    def log_probs(self, batch: RolloutBatch) -> np.ndarray:
        """Return the log-probabilities of a rollout's tokens under the policy's present weights, ``[total]``."""
        return forward.log_probs(self.args, self.model, self.forward_step, batch)

    def reference_log_probs(self, batch: RolloutBatch) -> np.ndarray:
        """Return the log-probabilities of a rollout's tokens under the reference model, ``[total]``."""
        return self.reference.log_probs(batch, self.model, self.forward_step)

    def teacher_log_probs(self, batch: RolloutBatch) -> np.ndarray:
        """Return the log-probabilities of a rollout's tokens under the teacher, ``[total]``."""
        if isinstance(self.teacher, TeacherServer):
            return self.teacher.log_probs(batch)
        return self.teacher.log_probs(batch, self.model, self.forward_step)

    # ---- rollouts

    def plan_rollout(self) -> RolloutPlan:
        """Draw the prompts of the next rollout and return its plan, which is equal on all ranks.

        With --dynamic-sample and --over-sampling-ratio the plan has all prompts that the rollout can start, with
        --partial-rollouts those that start beside the unfinished ones.
        """
        args = self.args
        recorded = self.replay.get(self.rollouts) if self.replay is not None else None
        recording = Recording(self.ledger, self.rollouts) if self.ledger is not None else None
        self.rollouts += 1
        sampling = training_sampling(args, self.rollouts)
        seed = rollout_seed(args.seed, self.rollouts)
        if recorded is not None:
            return RolloutPlan([], args.num_generations, sampling, seed, recorded=recorded)
        if self.engine.streams:  # it has prompts already
            return RolloutPlan((), args.num_generations, sampling, seed)
        num_groups = args.generation_batch_size // args.num_generations
        resample_times = args.max_resample_times if args.dynamic_sample else 0
        count = prompts_to_draw(num_groups, args.over_sampling_ratio, resample_times)
        if self.partial is not None:
            count = self.partial.prompts_to_draw()
        prompts = draw(self.dataset, self.sampler, count)
        selection = None
        if args.dynamic_sample or args.over_sampling_ratio > 1:
            selection = Selection(
                self.engine,
                num_groups,
                args.num_generations,
                args.over_sampling_ratio,
                resample_times,
                self.scorer,
                filter_weights(args),
            )
        return RolloutPlan(prompts, args.num_generations, sampling, seed, selection, self.partial, recording)

    def collect(self, plan: RolloutPlan, divide: Divide | None = None) -> RolloutBatch:
        """Return the completions of a plan with their rewards, and the tokens of those that this rank computes.

        ``divide`` divides the completions into updates; None for an evaluation, which needs no tokens.
        A plan without prompts is for the next batch of an engine that streams.
        Prints the first failure of each reward function. Prompts without a kept group return to the sampler.
        """
        batch = self._collect(plan, partial(self.computes, divide=divide))
        if divide is None:
            return batch
        if self.args.max_staleness:
            keeps_cache = self.args.weight_update == "keep"
            batch = replace(batch, newest=weight_check.newest_tokens(batch, self.iteration, keeps_cache))
        return self._with_images(batch)

    def _with_images(self, batch: RolloutBatch) -> RolloutBatch:
        if self.images is None:
            return batch
        if batch.image_bytes is not None:
            self.images.take_episodes(shown_images(batch))
            own, flops = np.zeros(batch.num_completions), TowerFlops(self.args)
            for i in np.flatnonzero(batch.held & (batch.image_keys < 0)):
                own[i] = flops.update(self.images.of(int(batch.image_keys[i])).grids)
            self.episode_flops = of_completions(batch, own)
        # The probe of an engine (`_probe_engine`) has prompts of rows, even where the rollouts are episodes.
        images_of = self.images.of if batch.image_bytes is None else self.images.of_episode
        return with_images(batch, images_of, bool(self.args.mrope_section))

    def _collect(self, plan: RolloutPlan, needs: Needs) -> RolloutBatch:
        if plan.recorded is not None:
            return self._collect_recorded(plan.recorded, needs)
        batch = (self._collect_from_stream if self.engine.streams else self._collect_rollout)(plan, needs)
        check_episodes(batch)
        self._record(plan)
        return batch

    def _collect_rollout(self, plan: RolloutPlan, needs: Needs) -> RolloutBatch:
        capacity = self.args.vllm_max_num_seqs if self.args.rollout_balancing == "dynamic" else None
        show = self.logger.rollout_progress(self.engine.num_replicas)

        def after_step(completions: Sequence[Completion], under_way: int) -> None:
            show(completions, under_way)
            self.early_exit.check_rollout(self.engine)

        if plan.partial is not None:
            batch, self.reward_failures = collect_partial_rollout(
                self.engine, plan, self.scorer, self.tokenizer, self.timers, after_step, needs
            )
            self.sampling_metrics = staleness_metrics(batch, self.synced_iteration, self.args.updates_per_rollout)
        else:
            batch, self.reward_failures = collect_rollout(
                self.engine, plan, self.scorer, self.tokenizer, self.timers, capacity, after_step, needs
            )
        if plan.selection is not None:
            unused, self.sampling_metrics = plan.selection.close()
            self.sampler.give_back([plan.prompts[number].id for number in unused])
        drafts = metrics_of_all_ranks(self.engine.drafts if self.engine.is_lead else None)
        self.sampling_metrics = self.sampling_metrics | drafts
        self._print_failed_episodes()
        if self.scorer is not None:
            print_first_failures(self.scorer.failures, self.failed_rewards, dist.get_rank())
        return batch

    def _print_failed_episodes(self, where: str = "") -> None:
        for line in self.engine.failures() if isinstance(self.engine, Conversing) else []:
            print(f"[rank {dist.get_rank()}] {where}{line}", flush=True)

    def _record(self, plan: RolloutPlan) -> None:
        """Write the record of a training batch into the ledger, if there is one."""
        if plan.recording is not None:
            with self.timers("ledger"):
                metrics = self.sampling_metrics | self.sync_metrics
                sampler = self.sampler.state_dict()
                plan.recording.close(sampler, metrics, self.reward_failures, plan.sampling.num_kept, self.partial)
        elif self.engine.streams and not plan.prompts and self.ledger is not None:
            with self.timers("ledger"):
                started, taken, num_kept = self.engine.position(), self.engine.taken, plan.sampling.num_kept
                if taken is not None:
                    rest = started["sampler"], self.sampling_metrics, self.reward_failures, num_kept, started["stream"]
                    self.ledger.record(BatchRecord(self.rollouts - 1, taken, *rest))

    def _collect_recorded(self, record: BatchRecord, needs: Needs) -> RolloutBatch:
        """Return a batch of the ledger; the sampler and the unfinished groups are then as the batch left them."""
        with self.timers("rollout"):
            batch = self.replay.collect(record, needs)
        if record.sampler is not None:
            self.sampler.load_state_dict(record.sampler)
        self.sampling_metrics, self.sync_metrics = record.metrics, {}
        self.reward_failures = record.reward_failures
        if self.partial is not None:
            groups = self.replay.unfinished(record.number, self.partial.replica, prompts_of(self.dataset))
            self.partial.state = Unfinished(groups, record.started["started"], record.started["version"])
        elif self.engine.streams:
            self.engine.restore(record.started)
        return batch

    def computes(self, batch: RolloutBatch, divide: Divide | None) -> Bool:
        """Return [n] which completions this rank computes: in an update, or in a pass for log-probabilities before it.

        A pass can divide the rollout in another way than the updates: it is of all completions, with another budget of
        tokens, or of a model with another parallel configuration.
        """
        computes = np.zeros(batch.num_completions, bool)
        if divide is None:
            return computes
        args, updates = self.args, divide(batch.num_completions)
        passes = [(completions, None) for completions in updates]
        if may_need_scores(args):
            passes += [(np.sort(completions), args.logprobs_max_tokens_per_microbatch) for completions in updates]
        if needs_old_log_probs(args):
            passes.append((np.arange(batch.num_completions), args.logprobs_max_tokens_per_microbatch))
        for completions, max_tokens in passes:
            computes[forward.own_completions(args, batch, completions, max_tokens)] = True
        for model in (self.reference, self.teacher):
            if model is not None and not isinstance(model, TeacherServer):
                computes[model.own_completions(batch)] = True
        return computes

    def _collect_from_stream(self, plan: RolloutPlan, needs: Needs) -> RolloutBatch:
        with self.timers("rollout"):
            if plan.prompts:
                batch, self.reward_failures = self.engine.generate(plan, needs)
                return batch
            batch, self.reward_failures, metrics = self.engine.take(needs)
            staleness = staleness_metrics(batch, self.synced_iteration, self.args.updates_per_rollout)
            self.sampling_metrics = metrics | staleness
        return batch

    # ---- the engine

    def engine_for_rollout(self) -> AbstractContextManager[None]:
        """Return the context of the next rollout: `engine_awake`, or nothing if the ledger has the batch."""
        return contextlib.nullcontext() if self.replays(self.rollouts) else self.engine_awake()

    def replays(self, batch: int) -> bool:
        """Return whether this batch (from 0) is read from a ledger."""
        return self.replay is not None and self.replay.get(batch) is not None

    @contextlib.contextmanager
    def engine_awake(self) -> Iterator[None]:
        """Context in which the engine uses the device, with the newest weights and a KV cache.

        1. `_offload`: gradients and optimizer state move to the host
        2. ``engine.wake_weights``: the engine allocates memory for its weights
        3. `sync`: the engine receives the trainer's weights, if it does not hold them
        4. `_offload`: the trainer's weights move to the host
        5. ``engine.wake_cache``: the engine allocates memory for its KV cache
        6. `_probe_engine`: with --check-weight-sync, and for engines on ranks of their own with --max-staleness, every
           replica completes a few prompts
        7. the body: rollouts
        8. ``engine.sleep``: the engine frees its memory
        9. `_reload`: the trainer's tensors return to the device
        10. `_check_probe`: the probe's log-probabilities are compared with the trainer's

        Optimizer state and KV cache are thus never on the device together; the trainer's weights and the KV cache are
        only without --offload-model. Steps 1 and 4 move only what a colocated vLLM needs the memory of
        (`needed_by_engine`), and the optimizer state returns beside the next passes: the optimizer's first step waits
        for it. Step 1 has nothing to run beside it, because steps 2 and 3 are short and need its memory. If the
        engine is lost in steps 2 to 8, `_raise_engine_lost` ends the run.
        """
        memory = {"train": self._memory()}
        position = None if self.engine.streams else self._position()  # a stream goes on meanwhile
        probe = None
        offloaded = self._offload(self.state_offloader, margins=2)
        try:
            self.device_memory.mark(engine=False)
            with self.device_memory.phase("the engine's allocation of memory for its weights"):
                self.engine.wake_weights()
            new_weights = self.synced_iteration != self.iteration or not self.engine.has_weights
            if new_weights:
                self.sync()
            memory["sync"] = self._memory()
            offloaded += self._offload(self.weight_offloader, margins=1)
            self.device_memory.mark(engine=True)
            with self.device_memory.phase("the engine's allocation of its KV cache"):
                self.engine.wake_cache()
            memory |= {"rollout": self._memory(), "offloaded": offloaded / 2**30}
            probes_adapter = self.args.lora_weight_sync == "adapter" and not self.adapter_probed
            if probes_adapter:
                with self.timers("sync"):
                    probe_adapter(self.engine)
                self.adapter_probed = True
            # Beside --max-staleness hardly a token of a batch is of the newest weights (`check_engine`).
            stale = self.engine.streams and self.args.max_staleness > 0
            # Servers that load an adapter have read the base themselves.
            unknown_base = probes_adapter and has_servers(self.args)
            if new_weights and (self.args.check_weight_sync or stale or unknown_base):
                probe = self._probe_engine()
            yield
            self.device_memory.mark(engine=True)
            self.engine.sleep()
        except EngineLost as error:
            self._raise_engine_lost(error, position)
        memory["asleep"] = self._memory()
        self._reload()
        if probe is not None:
            self._check_probe(probe)
        self.memory = {f"memory/{stage}": size for stage, size in memory.items()} if torch.cuda.is_available() else {}

    def sync(self) -> None:
        """Send the trainer's weights to the engine; completions carry this iteration as their version from now on.

        An engine that holds the adapter beside the weights receives the weights only when it has none, and so with the
        frozen parts of a vision tower.
        """
        stream = stream_merged if self.args.lora_weight_sync == "merged" else stream_hf
        with self.timers("sync"), forward.parameters_complete(self.args, self.model):
            if self.args.lora_weight_sync == "adapter":
                self.sync_metrics = sync_adapter(self.args, self.engine, self.model, self.iteration)
            else:
                weights = stream(self.model, self.args, only_trained=self.engine.has_weights)
                self.engine.update_weights(weights, self.iteration)
            self.synced_iteration = self.iteration
            if self.args.check_weight_sync:
                weight_check.compare_tensors(self.engine, stream(self.model, self.args), self.iteration)

    def _offload(self, offloader: Offloader, margins: int) -> int:
        """Free the memory that the engine needs; return the bytes that were copied to the host."""
        # A pending gather of parameters would write into freed memory.
        with self.timers("offload"), forward.parameters_complete(self.args, self.model):
            return offloader.to_host(needed_by_engine(self.args, self.engine, margins)).copied

    def _reload(self) -> None:
        with self.timers("offload"):
            self.weight_offloader.to_device()
            self.state_offloader.to_device(background=True)

    def _probe_engine(self) -> RolloutBatch:
        """Return completions of the first prompts of the data by every replica."""
        with self.timers("sync"):
            prompts = self.dataset.first(weight_check.PROMPTS_PER_REPLICA)
            if self.engine.streams:
                plan = weight_check.probe_plan(self.args, prompts, self.engine.num_replicas)
                probe, _ = self.engine.generate(plan, everything, data="train", scored=False)
            else:
                probe = weight_check.probe(self.args, self.engine, prompts, self.tokenizer, self.timers)
            self._print_failed_episodes("probe of the weights: ")
            return self._with_images(probe)

    def _check_probe(self, probe: RolloutBatch) -> None:
        """Compare the probe with the trainer's forward pass, which has enough device memory only after the rollout."""
        with self.timers("sync"):
            replicas = self.engine.num_replicas
            weight_check.compare_log_probs(self.args, self.model, self.forward_step, probe, replicas)

    @staticmethod
    def _memory() -> float:
        """Return the GiB in use on this rank's device, by all processes; 0 on a CPU."""
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        return (total - free) / 2**30

    def _raise_engine_lost(self, error: EngineLost, position: dict[str, Any] | None) -> NoReturn:
        """Raise EngineLost with the cause and the checkpoint for a resume. Collective.

        The run is saved in its state at ``position`` (None: its present state) if all ranks answer and each can reload
        its tensors. A device does not answer after a blocked NCCL call or an illegal memory access; the message then
        names the newest checkpoint.
        """
        able = device_answers()
        if able:
            try:
                if not self.engine.streams:  # which has groups to save
                    self.engine.close()  # frees its memory
                self._reload()
                self.state_offloader.complete()
            except (GrpoError, RuntimeError) as reason:
                print(f"[rank {dist.get_rank()}] the run cannot be saved: {reason}", flush=True)
                able = False
        if isinstance(error, Preempted):
            self.early_exit.mark(str(error))
            able &= self.early_exit.save_fits()
        lost = type(error)(f"{str(error).rstrip('.')}. {self._try_save(able, position)}")
        lost.saved = bool(self.args.save) and checkpoint.latest_iteration(self.args.save) == self.iteration
        raise lost from error

    def _try_save(self, able: bool, position: dict[str, Any] | None) -> str:
        """Save the run in its state at ``position`` if all ranks are ``able``; return a sentence on how to resume."""
        save = self.args.save
        if not save:
            return newest_in_words(save)
        if self.background_saves is not None:
            with progress.phase("save"):
                self.background_saves.wait()
        newest = checkpoint.latest_iteration(save)
        if newest != self.iteration and all_ranks_agree(able):
            with contextlib.suppress(GrpoError):
                self.save(position, last=True)
            newest = checkpoint.latest_iteration(save)
        if newest == self.iteration:
            return f"The run is saved at iteration {newest}: --load {save} resumes from it"
        return f"The run could not be saved. {newest_in_words(save)}"

    def check_engine(self, batch: RolloutBatch, row: dict[str, float]) -> None:
        """Raise GrpoError if the engine did not sample with the trainer's weights.

        The version of every token must be that of the last sync, or at most --max-staleness syncs older. With equal
        weights, the log-probabilities of engine and trainer differ only by rounding.
        """
        if self.replays(self.rollouts - 1):  # nothing was sampled now
            return
        oldest = self.synced_iteration
        if self.args.max_staleness:
            oldest -= self.args.max_staleness * self.args.updates_per_rollout
        versions = batch.weight_version[batch.response_mask == 1]
        stale = ((versions < oldest) | (versions > self.synced_iteration)).any()
        limit = weight_check.largest_mismatch(self.args)
        gap = row.get("mismatch/newest_mean_abs" if self.args.max_staleness else "mismatch/mean_abs", 0.0)
        if stale or not gap <= limit:  # nan exceeds every limit
            raise GrpoError(
                "the engine does not hold the trainer's weights: it sampled with version "
                f"{np.unique(versions).tolist()}, the last sync "
                f"was {self.synced_iteration}; mean difference of log-probabilities {gap:.2g} nats, limit {limit:g} "
                f"(--mismatch-limit). {weight_check.ENDING}"
            )

    # ---- metrics and logs

    @cached_property
    def flops(self) -> ModelFlops:
        """FLOPs of the model's passes."""
        return ModelFlops(self.args)

    def flops_of(self, batch: RolloutBatch, completions: Int64) -> float:
        """Return the TFLOP of an update with these completions; images that several share are encoded once."""
        found = text_flops(self.args, self.flops, batch, completions)
        if batch.visual_index is not None:
            keys = np.unique(batch.image_keys[completions])
            assert self.images is not None
            of_rows = [self.images.of_episode(row).grids for row in keys[keys >= 0].tolist()]
            found += TowerFlops(self.args).update(chain.from_iterable(of_rows))
            if batch.image_sizes is not None:
                assert self.episode_flops is not None
                found += self.episode_flops[completions].sum()
        return found

    def rollout_metrics(self, batch: RolloutBatch, rewards: np.ndarray) -> dict[str, float]:
        """Return the metrics of a rollout's rewards (weighted sums ``[n]``) and lengths, with the names of METRICS."""
        groups = group_statistics(rewards, batch.group_ids)
        row = {
            "reward/mean": mean_of_scored(rewards),
            "reward/std": groups.mean_std,
            "reward/failures": self.reward_failures,
            "reward/zero_std_groups": groups.zero_std_groups / groups.num_groups,
            "tokens/rollout": int(batch.response_lengths.sum()),
            "completion/length_mean": float(batch.response_lengths.mean()),
            "completion/length_min": int(batch.response_lengths.min()),
            "completion/length_max": int(batch.response_lengths.max()),
            "completion/truncated": float((batch.finish_reasons == FinishReason.LENGTH).mean()),
        }
        if self.args.environment:
            row["environment/turns"] = float(batch.turns.mean())
            row["environment/tokens"] = float((batch.completion_lengths - batch.response_lengths).mean())
            row["environment/failed"] = float((batch.finish_reasons == FinishReason.FAILED).mean())
        if self.args.tool_call_parser and batch.malformed_calls is not None:
            row["turns/malformed_calls"] = float(batch.malformed_calls.sum() / batch.turns.sum())
        for name, column in zip(self.args.reward_funcs, batch.rewards.T, strict=True):
            row[f"reward/{name}/mean"] = mean_of_scored(column)
            if len(scored := column[~np.isnan(column)].astype(np.float64)):
                row |= {f"reward/{name}/min": float(scored.min()), f"reward/{name}/max": float(scored.max())}
                row[f"reward/{name}/std"] = float(scored.std(ddof=1)) if len(scored) > 1 else 0.0
        return row | self.sampling_metrics | self.sync_metrics | self.memory

    def advance(self, metrics: dict[str, float]) -> None:
        """Count one finished update and its tokens; after the last one of a rollout, do what --on-bad-update says."""
        self.iteration += 1
        self.tokens += metrics["tokens/update"]
        if self.bad_updates.restore_due and self.due(self.args.updates_per_rollout):
            self._restore()

    def _restore(self) -> None:
        """Set the model and the optimizer to the newest checkpoint of --save; the run goes on with the next prompts."""
        own = {"load": self.args.save, "no_load_optim": False, "no_load_rng": True}
        source = argparse.Namespace(**vars(self.args) | own)
        with self.timers("save"), forward.parameters_complete(self.args, self.model):
            self.state_offloader.complete()
            self._end_background_save()  # a load deletes what is not complete
            iteration, _ = checkpoint.load_checkpoint(source, self.model, self.optimizer, self.scheduler)
        self.bad_updates.restore_due = False
        self.logger.print(f"model and optimizer are those of the checkpoint of iteration {iteration} again")

    def log(self, metrics: dict[str, float]) -> None:
        """Log the metrics of one update (or of an evaluation before the first) with the seconds of each phase."""
        if "tokens/update" in metrics:
            metrics = metrics | {
                "tokens/total": self.tokens,
                "consumed/prompts": self.sampler.consumed,
                "consumed/left_out": self.sampler.left_out,
            }
        if self.args.log_params_norm:
            with forward.parameters_complete(self.args, self.model):
                metrics = metrics | {"params_norm": train_step.params_norm(self.model)}
        if torch.cuda.is_available():
            metrics = metrics | self.device_memory.peaks()
        seconds = self.timers.collect()
        if "time/rollout" not in seconds:  # only the first update of a rollout reports what the rollout did
            of_rollout = ("tokens/rollout", "drafts/")
            metrics = {name: value for name, value in metrics.items() if not name.startswith(of_rollout)}
        self._check_save_directory()
        self.logger.log(self.iteration, metrics | seconds)
        self.profiler.after(self.iteration)

    @contextlib.contextmanager
    def logged_if_saved(self, metrics: dict[str, float]) -> Iterator[None]:
        """Context in which the loss of the engine logs the metrics of an update that the checkpoint already holds.

        A resumed run continues after this update.
        """
        try:
            yield
        except EngineLost as lost:
            if lost.saved:
                self.log(metrics)
            raise

    def _check_save_directory(self) -> None:
        """Raise GrpoError if another run has --save now; make the directory again if it was deleted."""
        lock, save = self.save_lock, self.args.save
        if lock is None:
            return
        if holder := lock.taken_by():
            raise GrpoError(f"--save {save} is no longer this run's: {holder}")
        if lock.deleted():
            message = f"--save {save} was deleted during the run, its checkpoints with it"
            if self.args.on_save_error == "stop":
                raise GrpoError(f"{message} (--on-save-error stop)")
            lock.take_again()
            self.logger.open_files()
            write_run_record(self.args, self.iteration)
            self.logger.print(
                f"{message}: it is made again, and the run goes on without a checkpoint until the next save"
            )

    def log_rollout(self, batch: RolloutBatch, rewards: np.ndarray) -> None:
        """Log the metrics of a rollout that no update follows (--rollout-only)."""
        self._check_save_directory()
        updates = self.rollouts * self.args.updates_per_rollout
        self.logger.log(updates, self.rollout_metrics(batch, rewards) | self.timers.collect())

    def log_completions(self, batch: RolloutBatch) -> None:
        """Write some completions of a rollout, with rewards and advantages, to ``completions.jsonl``."""
        picks = chosen(batch.advantages, self.args.num_completions_to_log)
        logged = np.zeros(batch.num_completions, bool)
        logged[[i for i, _ in picks]] = self.logger.active
        batch = with_tokens_of(batch, logged)
        if self.logger.active:
            rows = [completion_row(batch, i, why, self.args.reward_funcs, self.tokenizer) for i, why in picks]
            self.logger.log_completions(self.iteration + 1, rows)

    # ---- position, checkpoints and end

    def due(self, interval: int | None) -> bool:
        """Return whether the iteration is a multiple of ``interval``."""
        return bool(interval) and self.iteration % interval == 0

    def finished(self) -> bool:
        """Return whether the run ends here, before another rollout. Collective."""
        if self.iteration >= self.args.train_iters:
            return True
        self.left_early = self.early_exit.reason()
        if self.left_early:
            self.logger.print(f"leaving at iteration {self.iteration}: {self.left_early}")
            return True
        if self.args.rollout_only and self.rollouts * self.args.updates_per_rollout >= self.args.train_iters:
            return True
        if self.args.replay_rollouts and not self.replays(self.rollouts):
            self.logger.print(f"leaving at iteration {self.iteration}: the recorded run ends here")
            return True
        # Not at the first iteration, so that the same command continues to the next multiple after such an exit.
        return self.due(self.args.exit_interval) and self.iteration > self.first_iteration

    def _position(self) -> dict[str, Any]:
        position = {
            "sampler": self.sampler.state_dict(),
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "bad_updates": self.bad_updates.state_dict(),
        }
        position |= self.engine.position()
        return position if self.partial is None else position | {"partial": self.partial.state}

    def save(self, position: dict[str, Any] | None = None, last: bool = False) -> None:
        """Write a checkpoint (of ``position``, if given), from which a resume continues without any difference.

        If it cannot be written, the run goes on, unless --on-save-error is stop or the save is the ``last``. With
        --async-save the last save is complete at the return, others later.
        """
        on_rank_0(self._check_save_directory)
        self.logger.flush()
        position, save_unfinished = position or self._position(), None
        if self.partial is not None:
            unfinished = position["partial"]
            position = position | {"partial": self.partial.position(unfinished)}
            if self.engine.is_lead:
                save_unfinished = lambda directory: self.partial.save(directory / DIRECTORY, unfinished)  # noqa: E731
        if self.engine.streams and dist.get_rank() == 0:
            save_unfinished = lambda directory: self.engine.save(directory / DIRECTORY)  # noqa: E731
        began = time.monotonic()
        with self.timers("save"), forward.parameters_complete(self.args, self.model):
            self.state_offloader.complete()
            self._end_background_save()
            with self._save_errors(last):
                # With these files a checkpoint can be resumed and exported without the original model directory.
                assets = Path(self.args.save, hf.ASSETS_DIR)
                template, bounds = self.args.chat_template, hf.image_bounds(self.args)
                on_rank_0(hf.copy_assets, self.args.tokenizer_model, assets, template, bounds)
                # A reference model that was never updated can be loaded from its origin again.
                updated = self.reference is not None and self.reference.updated
                checkpoint.save_checkpoint(
                    self.args,
                    self.iteration,
                    self.model,
                    self.optimizer,
                    self.scheduler,
                    extra_state=position,
                    save_reference=(lambda directory: self.reference.save(directory, self.model)) if updated else None,
                    save_on_this_rank=save_unfinished,
                )
                if last:
                    checkpoint.wait_for_background()
                self._roll_ledger()
        self.early_exit.save_seconds = time.monotonic() - began
        if self.background_saves is not None:  # the last save of a run is waited for
            self.early_exit.save_seconds = max(self.early_exit.save_seconds, self.background_saves.seconds)

    def _roll_ledger(self) -> None:
        """Delete the files of the ledger that no checkpoint needs, and begin new ones."""
        if self.ledger is None:
            return
        self.ledger.roll()
        kept = checkpoint_directory.iterations(self.args.save)
        if self.args.max_checkpoints_to_keep is not None and kept and dist.get_rank() == 0:
            oldest = int(kept[0].name[5:]) // self.args.updates_per_rollout
            delete_before(self.ledger.directory, oldest, self.args.max_staleness)

    def _end_background_save(self) -> None:
        """Wait until the checkpoint that is being written is complete. Collective."""
        with progress.phase("save"), self._save_errors():
            checkpoint.wait_for_background()

    @contextlib.contextmanager
    def _save_errors(self, last: bool = False) -> Iterator[None]:
        """Context in which a failed save ends the run only with --on-save-error stop, or if it is the ``last``."""
        try:
            yield
        except GrpoError as error:
            if last or self.args.on_save_error == "stop":
                raise
            newest = checkpoint.latest_iteration(self.args.save)
            rest = "there is none yet" if newest is None else f"the newest is iteration {newest}"
            self.logger.print(f"the run goes on without a new checkpoint, {rest} (--on-save-error continue): {error}")

    def finish(self) -> None:
        """Save the newest iteration unless it is saved, export to Hugging Face's format, and close all parts.

        A run that ends early is saved but not exported, because its time may be limited. If a save or an export fails,
        GrpoError ends the run after the others.
        """
        steps = [] if self.args.rollout_only else [self._save_last]
        if not (self.left_early or self.args.rollout_only):
            steps += [self._export_adapter, self._export_hf]
        failed = []
        for step in steps:
            try:
                step()
            except GrpoError as error:
                failed.append(str(error))
        self.profiler.close()
        self.logger.close()
        self.engine.close()
        if self.scorer is not None:
            self.scorer.close()
        if self.ledger is not None:
            self.ledger.close()
        if self.watchdog is not None:
            self.watchdog.close()
        if failed:
            raise GrpoError(f"{'; '.join(failed)}. Make room, or correct the path. {newest_in_words(self.args.save)}")
        if self.args.save and not self.left_early and dist.get_rank() == 0:
            unmark(self.args.save)
        done = f"{self.rollouts} rollouts" if self.args.rollout_only else f"{self.iteration} updates"
        print_rank_0(f"done: {done}, {time.monotonic() - self.started:.0f} s")

    def _save_last(self) -> None:
        if not self.args.save:
            return
        self._end_background_save()
        if checkpoint.latest_iteration(self.args.save) == self.iteration:
            return
        if all_ranks_agree(self.early_exit.save_fits()):
            self.save(last=True)
        else:
            self.logger.print(f"a save takes longer than --exit-grace-seconds. {newest_in_words(self.args.save)}")

    def _export_adapter(self) -> None:
        args = self.args
        if args.save_adapter:
            with progress.phase("export"), forward.parameters_complete(args, self.model):
                save_adapter(args, self.model, args.save_adapter)
            self.logger.print(f"adapter in PEFT's format: {args.save_adapter}")

    def _export_hf(self) -> None:
        args = self.args
        if args.save_hf:
            with progress.phase("export"), forward.parameters_complete(args, self.model):
                shards = merged_shards(self.model, args) if args.lora_rank else None
                hf.save_hf(self.model, args, args.save_hf, tokenizer_dir=args.tokenizer_model, shards=shards)
            self.logger.print(f"Hugging Face export: {args.save_hf}")


def mean_of_scored(values: np.ndarray) -> float:
    """Return the mean of the values that are not nan; nan if all are."""
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if len(scored) else float("nan")
