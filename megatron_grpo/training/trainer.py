"""The parts of a run (model, engine, data, rewards, logs) and its position."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.algorithm.advantages import ADVANTAGES
from megatron_grpo.algorithm.arguments import may_need_scores, needs_old_log_probs
from megatron_grpo.checkpointing.checkpoint_directory import newest_in_words, room_in_words
from megatron_grpo.data.batch import Bool, Int64, RolloutBatch
from megatron_grpo.data.share import with_tokens_of
from megatron_grpo.data.tokenizer import Tokenizer
from megatron_grpo.models import forward
from megatron_grpo.observability.completion_log import (
    bounded_tokens,
    chosen,
    completion_row,
    held_out_row,
    pictures,
)
from megatron_grpo.observability.metrics import MetricsLogger, Timers
from megatron_grpo.observability.profiling import Profiler
from megatron_grpo.observability.watchdog import Watchdog
from megatron_grpo.parallel.agreement import device_answers, on_rank_0
from megatron_grpo.reference.reference_model import BaseReference, ReferenceModel, SwappedReference
from megatron_grpo.reference.teacher import Teachers
from megatron_grpo.rollout.collect import Needs, shown_images, with_images
from megatron_grpo.rollout.evaluation import HeldOut, logged
from megatron_grpo.rollout.rollout_metrics import rollout_metrics
from megatron_grpo.rollout.source import Rollout, RolloutSource, SourceState
from megatron_grpo.rollout.weight_sync import weight_check
from megatron_grpo.training import train_step
from megatron_grpo.training.bad_updates import BadUpdates
from megatron_grpo.training.best_checkpoint import best_in_words
from megatron_grpo.training.device_memory import DeviceMemory
from megatron_grpo.training.early_exit import EarlyExit, unmark
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.training.export import export_adapter, export_hf
from megatron_grpo.training.mixture import Mixture, parts_of_groups
from megatron_grpo.training.saves import Position, Saves
from megatron_grpo.training.update_flops import UpdateFlops
from megatron_grpo.training.warm_up import WarmUp
from megatron_grpo.utils import progress
from megatron_grpo.utils.arguments import Arguments
from megatron_grpo.utils.errors import EngineLost, GrpoError, Preempted
from megatron_grpo.utils.log import log, print_rank_0
from megatron_grpo.vision.encoded import divided
from megatron_grpo.vision.images import ImageStore, RowImages

WITHOUT_SIGNAL = 3  # rollouts without a difference of rewards after which a line says so

Divide = Callable[[int], list[np.ndarray]]  # from their number to the completions of each update
Reference = ReferenceModel | SwappedReference | BaseReference


@dataclass
class Trainer:
    """Parts of a run and its position; ``pretrain_grpo.train`` is the algorithm that uses them."""

    args: Arguments
    model: forward.Model
    optimizer: Any
    scheduler: Any
    reference: Reference | None
    source: RolloutSource
    lifecycle: EngineLifecycle
    tokenizer: Tokenizer
    held_out: HeldOut
    logger: MetricsLogger
    timers: Timers
    device_memory: DeviceMemory
    profiler: Profiler
    early_exit: EarlyExit
    saves: Saves
    watchdog: Watchdog | None = None
    bad_updates: BadUpdates = field(default_factory=lambda: BadUpdates("stop", None, None))
    left_early: str | None = None  # the reason, if the run ends before its last update
    teacher: Teachers | None = None
    images: ImageStore | None = None  # of a vision-language model
    warm_up: WarmUp | None = None  # with --sft-iters
    mixture: Mixture | None = None  # with --sft-loss-type
    iteration: int = 0  # of the newest update; below 0 in the warm-up
    tokens: int = 0
    without_signal: int = 0  # rollouts in a row in which all completions of each prompt have the same reward
    checked_rollouts: int = 0  # of this process, as the functions that have returned a value
    with_value: set[str] = field(default_factory=set)
    held_out_rows: list[dict[str, Any]] = field(default_factory=list)  # logged completions of --eval-only
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.policy_scheduler = self.scheduler
        if self.warm_up is not None and self.warm_up.left:
            self.iteration = -1 - self.warm_up.left
            self.scheduler = self.warm_up.schedule
            self.scheduler.step(0)
        self.first_iteration = max(0, self.iteration)  # of this process: above 0 after a resume
        self.flops = UpdateFlops(self.args, self.images)

    # ---- supervised warm-up

    def warming_up(self) -> bool:
        """Return whether another supervised update comes before the first rollout. Collective."""
        if self.iteration >= 0:
            return False
        self.left_early = self.early_exit.reason()
        return not self.left_early

    def demonstrations(self) -> RolloutBatch:
        """Return the demonstrations of the next supervised update."""
        assert self.warm_up is not None
        return self._with_images(self.warm_up.next_batch())

    def finish_warm_up_update(self, batch: RolloutBatch, row: dict[str, float]) -> None:
        """Count and log a supervised update, and save if it is due; after the last one, turn to the policy's updates.

        Collective.
        """
        warm_up = self.warm_up
        assert warm_up is not None
        self.iteration, warm_up.done = self.iteration + 1, warm_up.done + 1
        if self.bad_updates.restore_due:
            self.saves.restore()
            self.scheduler.step(0)  # the checkpoint has another learning rate
            self.bad_updates.restore_due = False
        self.log(warm_up.metrics(row, batch))
        if not warm_up.left:
            self.logger.flush()  # no row combines updates of both kinds
            self.iteration, self.scheduler = 0, self.policy_scheduler
            self.scheduler.step(0)
            self.profiler.after(0)
            self.bad_updates.forget()
            named = self.args.ref_load or self.args.ref_load_hf
            if isinstance(self.reference, ReferenceModel | SwappedReference) and not named:
                self.reference.ema_update(self.args, self.model, 1.0)  # the policy's updates begin at these weights
        if self.args.save and (not warm_up.left or self.due(self.args.save_interval)):
            self.saves.write(self.position())

    # ---- demonstrations beside the rollout

    def joined_demonstrations(self, batch: RolloutBatch) -> RolloutBatch | None:
        """Return the demonstrations that join the groups of a rollout (--sft-loss-type luffy)."""
        return self.mixture.of_groups(batch) if self.mixture is not None and self.mixture.joins_groups else None

    def mixed_demonstrations(
        self, joined: RolloutBatch | None, batch: RolloutBatch, parts: Sequence[np.ndarray], part: int
    ) -> RolloutBatch | None:
        """Return the demonstrations of the next update, which has ``parts[part]`` of the batch; None without any.

        They are drawn ones, or those of ``joined`` whose groups are in this part.
        """
        if joined is not None:
            own = np.flatnonzero(parts_of_groups(batch.group_ids, parts, joined.group_ids) == part)
            return joined.select(own) if len(own) else None
        if self.mixture is None or self.mixture.joins_groups:
            return None
        drawn = self.mixture.next_batch(self.iteration)
        return None if drawn is None else self._with_images(drawn)

    # ---- rollouts

    def next_rollout(self, divide: Divide) -> Rollout:
        """Return the next rollout: all completions with their rewards, and the tokens of those that this rank computes.

        ``divide`` divides the completions into updates.
        """
        models = self.reference, self.teacher

        def computed(batch: RolloutBatch) -> Bool:
            return computed_completions(self.args, batch, divide(batch.num_completions), models)

        needs = Needs(computed, prefixes=self.args.share_prompts)
        rollout = self.source.next(needs, self.lifecycle.synced)
        batch = rollout.batch
        if self.args.max_staleness:
            keeps_cache = self.args.weight_update == "keep"
            batch = replace(batch, newest=weight_check.newest_tokens(batch, self.iteration, keeps_cache))
        return replace(rollout, batch=self._with_images(batch))

    def _with_images(self, batch: RolloutBatch) -> RolloutBatch:
        if self.images is None:
            return batch
        if batch.image_bytes is not None:
            self.images.take_episodes(shown_images(batch))
            self.flops.take_episodes(batch)
        # The probe of an engine (`RolloutSource.probe`) has prompts of rows, even where the rollouts are episodes.
        images_of = self.images.of if batch.image_bytes is None else self.images.of_episode
        return with_images(batch, images_of, bool(self.args.mrope_section))

    def _images_of(self, batch: RolloutBatch, i: int) -> RowImages | None:
        """Return the images of completion ``i``."""
        if self.images is None:
            return None
        row = int(batch.row_ids[i])
        if batch.image_bytes is None:
            return self.images.of(row)
        return self.images.of_shown(row, divided(batch.image_bytes[batch.image_slice(i)]))

    def teachers_heads(self) -> AbstractContextManager[None]:
        """Return the context of an update, in which the policy's last stage has the output layers that it distils."""
        return contextlib.nullcontext() if self.teacher is None else self.teacher.heads_on_device(self.model)

    # ---- the engine

    def engine_for_rollout(self) -> AbstractContextManager[None]:
        """Return the context of the next rollout: `engine_awake`, or nothing if the ledger has the batch."""
        return contextlib.nullcontext() if self.source.next_is_recorded else self.engine_awake()

    @contextlib.contextmanager
    def engine_awake(self) -> Iterator[None]:
        """Context in which the engine can generate with the newest weights; its loss saves and ends the run."""
        state = self.source.state_if_lost()
        try:
            with self.lifecycle.awake(self.iteration, self._probe):
                yield
        except EngineLost as error:
            self._raise_engine_lost(error, state)

    def _probe(self) -> Callable[[], RolloutBatch]:
        """Begin the probe of the engine's weights; return the function that returns its completions."""
        finish = self.source.probe()
        return lambda: self._with_images(finish())

    def _raise_engine_lost(self, error: EngineLost, state: Callable[[], SourceState]) -> NoReturn:
        """Raise EngineLost with the cause and the checkpoint for a resume. Collective.

        The run is saved with this ``state`` of its source if all ranks answer and each can reload its tensors. A device
        does not answer after a blocked NCCL call or an illegal memory access; the message then names the newest
        checkpoint.
        """
        able = device_answers()
        if able:
            try:
                self.source.free_device()
                self.lifecycle.reload()
                self.lifecycle.complete()
            except (GrpoError, RuntimeError) as reason:
                log(f"the run cannot be saved: {reason}")
                able = False
        if isinstance(error, Preempted):
            self.early_exit.mark(str(error))
            able &= self.saves.fits()
        lost = type(error)(f"{str(error).rstrip('.')}. {self.saves.write_lost(self.position(), state, able)}")
        lost.saved = self.saves.holds(self.iteration)
        raise lost from error

    # ---- metrics and logs

    def rollout_metrics(self, rollout: Rollout, rewards: np.ndarray) -> dict[str, float]:
        """Return the metrics of a rollout, with the names of METRICS; ``rewards``: weighted sums ``[n]``.

        Print a line after `WITHOUT_SIGNAL` rollouts in a row in which no prompt teaches anything.
        """
        self._check_rewards(rollout.batch.rewards)
        metrics = rollout_metrics(self.args, rollout, rewards) | self.lifecycle.memory
        estimator = ADVANTAGES.get(self.args.advantage_estimator)
        others = {"function_rewards", "turn_rewards"} & estimator.parameters.keys()  # may differ where the sums do not
        joined = self.mixture is not None and self.mixture.joins_groups  # a demonstration may have another reward
        compares = estimator.compares_group and not others and self.teacher is None and not joined
        none = compares and metrics["reward/zero_std_groups"] == 1
        self.without_signal = self.without_signal + 1 if none else 0
        if self.without_signal == WITHOUT_SIGNAL:
            print_rank_0(
                f"note: in {WITHOUT_SIGNAL} rollouts all completions of each prompt had the same reward (mean "
                f'{metrics["reward/mean"]:g}): rewards teach nothing. See docs/troubleshooting.md, "The reward stays 0"'
            )
        return metrics

    def _check_rewards(self, rewards: np.ndarray) -> None:
        """Print a line about functions without a value in this process's first `WITHOUT_SIGNAL` rollouts.

        ``rewards``: ``[n, functions]``. Raise GrpoError if no function had one: a function that has returned values may
        leave rows out for as long as it likes, and so may functions of some rows only (--reward-routing).
        """
        self.checked_rollouts += 1
        if self.checked_rollouts > WITHOUT_SIGNAL or self.teacher is not None or self.args.rollout_only:
            return
        names, valued = self.args.reward_funcs, ~np.isnan(rewards).all(axis=0)
        self.with_value |= {name for name, has_value in zip(names, valued, strict=True) if has_value}
        silent = [name for name in names if name not in self.with_value]
        is_last, all_silent = self.checked_rollouts == WITHOUT_SIGNAL, len(silent) == len(names)
        if (
            not silent
            or self.checked_rollouts not in (1, WITHOUT_SIGNAL)
            or (self.args.reward_routing and not all_silent)
        ):
            return
        of_names = f"reward {' and '.join(f'"{name}"' for name in silent)}"
        of_rollouts = f"every completion of the first {f'{WITHOUT_SIGNAL} rollouts' if is_last else 'rollout'}"
        message = f"{of_names} returned None for {of_rollouts}. Does the function return its value?"
        if self.args.train_only:
            message = f"{of_names} is null in the ledger of --train-only for {of_rollouts}: write it from scored rows."
        if is_last and all_silent:
            raise GrpoError(f"{message} {newest_in_words(self.args.save)}")
        if all_silent:
            print_rank_0(f"note: {message} The run ends after {WITHOUT_SIGNAL} such rollouts")
        elif is_last:
            print_rank_0(f"note: {message} The run goes on with the others")

    def advance(self, metrics: dict[str, float]) -> None:
        """Count one finished update and its tokens; after the last one of a rollout, do what --on-bad-update says."""
        self.iteration += 1
        self.tokens += int(metrics["tokens/update"])
        if self.bad_updates.restore_due and self.due(self.args.updates_per_rollout):
            self.saves.restore()
            self.bad_updates.restore_due = False

    def log(self, metrics: dict[str, float]) -> None:
        """Log the metrics of one update (or of an evaluation before the first) with the seconds of each phase."""
        if "tokens/update" in metrics:
            metrics = metrics | {
                "tokens/total": self.tokens,
                "consumed/prompts": self.source.sampler.consumed,
                "consumed/left_out": self.source.sampler.left_out,
            }
        if self.args.log_params_norm:
            with forward.parameters_complete(self.model):
                metrics = metrics | {"params_norm": train_step.params_norm(self.model)}
        if torch.cuda.is_available():
            metrics = metrics | self.device_memory.peaks()
        seconds = self.timers.collect()
        if "time/rollout" not in seconds:  # only the first update of a rollout reports what the rollout did
            of_rollout = ("tokens/rollout", "drafts/", "stream/")
            metrics = {name: value for name, value in metrics.items() if not name.startswith(of_rollout)}
        self.saves.check_directory(self.iteration)
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

    def log_rollout(self, rollout: Rollout, rewards: np.ndarray) -> None:
        """Log the metrics of a rollout that no update follows (--rollout-only)."""
        self.saves.check_directory(self.iteration)
        updates = self.source.taken * self.args.updates_per_rollout
        self.logger.log(updates, self.rollout_metrics(rollout, rewards) | self.timers.collect())

    def log_completions(self, batch: RolloutBatch) -> None:
        """Write some completions of a rollout, with rewards and advantages, to ``completions.jsonl``."""
        assert batch.advantages is not None
        picks = chosen(batch.advantages, self.args.num_completions_to_log)
        logged = np.zeros(batch.num_completions, bool)
        logged[[i for i, _ in picks]] = self.logger.active
        batch = with_tokens_of(batch, logged)
        if self.logger.active:
            rows = [
                completion_row(batch, i, why, self.args.reward_funcs, self.tokenizer)
                | bounded_tokens(self.args, batch, i)
                | pictures(self._images_of(batch, i))
                for i, why in picks
            ]
            self.logger.log_completions(self.iteration + 1, rows)

    def held_out_to_log(self, batch: RolloutBatch) -> Bool:
        """Return [n] the completions of an evaluation that this rank logs, whose tokens it needs."""
        return logged(batch, self.held_out, self.args.eval_completions_to_log) & self.logger.active

    def log_held_out(self, kind: str, batch: RolloutBatch) -> None:
        """Write some completions of an evaluation to ``eval_completions.jsonl``; ``kind``: greedy or sampled."""
        rows = []
        for i in np.flatnonzero(self.held_out_to_log(batch)).tolist():
            place = int(batch.group_ids[i])
            row: dict[str, Any] = {"file": self.held_out.file_of(place), "kind": kind}
            row |= held_out_row(batch, i, self.args.reward_funcs, self.tokenizer)
            row["row"] = self.held_out.rows[place]
            rows.append(row | pictures(self.held_out.prompts[place].images))
        self.logger.log_completions(self.iteration, rows, held_out=True)
        if self.args.eval_only:
            self.held_out_rows += rows

    # ---- position, checkpoints and end

    def due(self, interval: int | None) -> bool:
        """Return whether the iteration is a multiple of ``interval``."""
        return bool(interval and self.iteration % interval == 0)

    def finished(self) -> bool:
        """Return whether the run ends here, before another rollout. Collective."""
        if self.iteration >= self.args.train_iters:
            return True
        self.left_early = self.early_exit.reason()
        if self.left_early:
            print_rank_0(f"leaving at iteration {self.iteration}: {self.left_early}")
            return True
        if self.args.rollout_only and self.source.taken * self.args.updates_per_rollout >= self.args.train_iters:
            return True
        if self.source.ended:
            print_rank_0(f"leaving at iteration {self.iteration}: the recorded run ends here")
            return True
        # Not at the first iteration, so that the same command continues to the next multiple after such an exit.
        return self.due(self.args.exit_interval) and self.iteration > self.first_iteration

    def position(self) -> Position:
        """Return the present position, for a checkpoint."""
        state = {
            "tokens": self.tokens,
            "bad_updates": self.bad_updates.state_dict(),
            "updates_per_rollout": self.args.updates_per_rollout,
        }
        if self.warm_up is not None:
            state["sft"] = self.warm_up.state()
        if self.mixture is not None:
            state["mixture"] = self.mixture.state()
        return Position(max(0, self.iteration), state)

    def finish(self) -> None:
        """Save the newest iteration unless it is saved, export to Hugging Face's format, and close all parts.

        A run that ends early is saved but not exported, because its time may be limited. If a save or an export fails,
        GrpoError ends the run after the others.
        """
        # In the warm-up all checkpoints are of iteration 0: the newest one may be of an earlier update.
        save = partial(self.saves.write_last, self.position(), again=self.iteration < 0)
        steps = [] if self.args.rollout_only else [save]
        if not (self.left_early or self.args.rollout_only):
            parts = self.args, self.model
            steps += [partial(export_adapter, *parts), partial(export_hf, *parts)]
        failed = []
        for step in steps:
            try:
                step()
            except GrpoError as error:
                failed.append(str(error))
        if failed:
            progress.error = "; ".join(failed)  # for the last state, which is written below
        self.close()
        if self.args.keep_best:
            print_rank_0(on_rank_0(best_in_words, self.args))
        if failed:
            message, cure = "; ".join(failed), room_in_words(self.args.save)
            raise GrpoError(message if cure in message else f"{message}. {cure}")
        if self.args.save and not self.left_early and dist.get_rank() == 0:
            unmark(self.args.save)
        done = f"{self.source.taken} rollouts" if self.args.rollout_only else f"{max(0, self.iteration)} updates"
        print_rank_0(f"done: {done}, {time.monotonic() - self.started:.0f} s")

    def close(self) -> None:
        """Close all parts."""
        self.profiler.close()
        self.logger.close()
        self.lifecycle.close()
        self.source.close()
        if self.watchdog is not None:
            self.watchdog.close()


def computed_completions(
    args: Arguments, batch: RolloutBatch, updates: Sequence[Int64], models: Sequence[Reference | Teachers | None]
) -> Bool:
    """Return [n] which completions this rank computes: in an update, or in a pass for log-probabilities before it.

    A pass can divide the rollout in another way than the updates: it is of all completions, with another budget of
    tokens, or of a model with another parallel configuration (``models``: reference and teachers, if any).
    """
    computes = np.zeros(batch.num_completions, bool)
    passes: list[tuple[Int64, int | None]] = [(completions, None) for completions in updates]
    if may_need_scores(args):
        passes += [(np.sort(completions), forward.budget_of_scores(args)) for completions in updates]
    if needs_old_log_probs(args):
        parts = forward.parts_of_old_policy(args, batch.num_completions, updates)
        passes += [(completions, forward.budget_of_scores(args)) for completions in parts]
    for completions, max_tokens in passes:
        computes[forward.own_completions(args, batch, completions, max_tokens)] = True
    for model in models:
        if model is not None:
            computes[model.own_completions(batch)] = True
    return computes
