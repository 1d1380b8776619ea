"""Checkpoints of a run in --save: what they hold, which failed save ends the run, and where a resume starts."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_grpo.checkpointing import checkpoint, checkpoint_directory
from megatron_grpo.checkpointing.background import BackgroundSaves
from megatron_grpo.checkpointing.checkpoint_directory import newest_in_words, room_in_words
from megatron_grpo.checkpointing.run_lock import RunLock
from megatron_grpo.models import forward
from megatron_grpo.observability.metrics import MetricsLogger, Timers
from megatron_grpo.observability.provenance import write_run_record
from megatron_grpo.parallel.agreement import all_ranks_agree, on_rank_0
from megatron_grpo.reference.reference_model import BaseReference, ReferenceModel, SwappedReference
from megatron_grpo.rollout.source import RolloutSource, SourceState
from megatron_grpo.training.best_checkpoint import new_best
from megatron_grpo.training.early_exit import EarlyExit
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.utils import progress
from megatron_grpo.utils.arguments import Arguments, replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.weights import hf


@dataclass(frozen=True)
class Position:
    """Position of the trainer. A checkpoint holds it and the state of the source."""

    iteration: int
    state: dict[str, Any]  # equal on all ranks, JSON's types


@dataclass(kw_only=True)
class Saves:
    """The parts of a run that a checkpoint holds, and the directory --save. All ranks call its methods together."""

    args: Arguments
    model: forward.Model
    optimizer: Any
    scheduler: Any
    reference: ReferenceModel | SwappedReference | BaseReference | None
    source: RolloutSource
    lifecycle: EngineLifecycle
    timers: Timers
    logger: MetricsLogger
    early_exit: EarlyExit
    lock: RunLock | None = None  # of rank 0, with --save
    background: BackgroundSaves | None = None  # with --async-save
    seconds: float = 0.0  # of the last save
    evaluation: tuple[int, dict[str, float]] = (0, {})  # iteration and metrics of the newest evaluation

    def write(self, position: Position, state: Callable[[], SourceState] | None = None, last: bool = False) -> None:
        """Write a checkpoint, from which a resume continues without any difference.

        ``state`` returns that of the source, by default its present one. If the checkpoint cannot be written, the run
        goes on, unless --on-save-error is stop or the save is the ``last``. With --async-save the last save is complete
        at the return, others later.
        """
        on_rank_0(self.check_directory, position.iteration)
        self.logger.flush()
        of_source = (state or self.source.state)()
        began = time.monotonic()
        with self._complete(), self._errors(last):
            # With these files a checkpoint can be resumed and exported without the original model directory.
            assets = Path(self.args.save, hf.ASSETS_DIR)
            template, bounds = self.args.chat_template, hf.image_bounds(self.args)
            on_rank_0(hf.copy_assets, self.args.tokenizer_model, assets, template, bounds)
            save_reference, reference = None, self.reference
            # A reference model that was never updated can be loaded from its origin again.
            if isinstance(reference, ReferenceModel | SwappedReference) and reference.updated:
                save_reference = partial(reference.save, policy=self.model)
            checkpoint.save_checkpoint(
                self.args,
                position.iteration,
                self.model,
                self.optimizer,
                self.scheduler,
                extra_state=position.state | of_source.position,
                save_reference=save_reference,
                save_on_this_rank=of_source.save,
                best=on_rank_0(self._new_best, position.iteration),
            )
            if last:
                checkpoint.wait_for_background()
            self.source.after_save(self._oldest_batch())
        self.seconds = time.monotonic() - began
        if self.background is not None:  # the last save of a run is waited for
            self.seconds = max(self.seconds, self.background.seconds)

    def _new_best(self, iteration: int) -> dict[str, Any] | None:
        """Return what best.json is to say if this iteration's checkpoint is the best one; call it on one rank."""
        evaluated, metrics = self.evaluation
        if not self.args.keep_best or evaluated != iteration:
            return None
        return new_best(self.args, iteration, metrics)

    def write_last(self, position: Position, again: bool = False) -> None:
        """Write the checkpoint of the end of a run, unless it takes longer than --exit-grace-seconds.

        One that is there is written ``again`` or left.
        """
        if not self.args.save:
            return
        self._end_background()
        if self.holds(position.iteration) and not again:
            return
        if all_ranks_agree(self.fits()):
            self.write(position, last=True)
        else:
            print_rank_0(f"a save takes longer than --exit-grace-seconds. {newest_in_words(self.args.save)}")

    def write_lost(self, position: Position, state: Callable[[], SourceState], able: bool) -> str:
        """Write the checkpoint of a run whose engine is lost if all ranks are ``able``; return how to resume."""
        save, iteration = self.args.save, position.iteration
        if not save:
            return newest_in_words(save)
        if self.background is not None:
            with progress.phase("save"):
                self.background.wait()
        if not self.holds(iteration) and all_ranks_agree(able):
            with contextlib.suppress(GrpoError):
                self.write(position, state, last=True)
        if self.holds(iteration):
            return f"The run is saved at iteration {iteration}: --load {save} resumes from it"
        return f"The run could not be saved. {newest_in_words(save)}"

    def holds(self, iteration: int) -> bool:
        """Return whether the newest checkpoint of --save is that of an iteration."""
        return bool(self.args.save) and checkpoint.latest_iteration(self.args.save) == iteration

    def fits(self) -> bool:
        """Return whether this rank expects a save to end within the grace of a signal: the last one is the measure."""
        return self.early_exit.leaves_time(self.seconds)

    def restore(self) -> None:
        """Set model, optimizer and schedule to the newest checkpoint, if there is one; the next prompts follow."""
        source = replaced(self.args, load=self.args.save, no_load_optim=False, no_load_rng=True)
        with self._complete():  # a load deletes what is not complete
            if on_rank_0(checkpoint.latest_iteration, self.args.save) is None:
                print_rank_0(f"there is no checkpoint in {self.args.save} yet: the run goes on without the bad update")
                return
            iteration, _ = checkpoint.load_checkpoint(source, self.model, self.optimizer, self.scheduler)
        print_rank_0(f"model and optimizer are those of the checkpoint of iteration {iteration} again")

    def check_directory(self, iteration: int) -> None:
        """Raise GrpoError if another run has --save now; make the directory again if it was deleted."""
        lock, save = self.lock, self.args.save
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
            write_run_record(self.args, self.args.explicit, iteration)
            print_rank_0(f"{message}: it is made again, and the run goes on without a checkpoint until the next save")

    @contextlib.contextmanager
    def _complete(self) -> Iterator[None]:
        """Context with all parameters and the whole optimizer state on the device, and no save in the background."""
        with self.timers("save"), forward.parameters_complete(self.model):
            self.lifecycle.complete()
            self._end_background()
            yield

    def _end_background(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        with progress.phase("save"), self._errors():
            checkpoint.wait_for_background()

    @contextlib.contextmanager
    def _errors(self, last: bool = False) -> Iterator[None]:
        """Context in which a failed save ends the run only with --on-save-error stop, or if it is the ``last``."""
        try:
            yield
        except GrpoError as error:
            if last:
                raise  # Trainer.finish adds the cure
            if self.args.on_save_error == "stop":
                raise GrpoError(f"{error}. {room_in_words(self.args.save)}") from error
            newest = checkpoint.latest_iteration(self.args.save)
            rest = "there is none yet" if newest is None else f"the newest is iteration {newest}"
            print_rank_0(f"the run goes on without a new checkpoint, {rest} (--on-save-error continue): {error}")

    def _oldest_batch(self) -> int | None:
        """Return the batch of the oldest checkpoint, on rank 0; None if --max-checkpoints-to-keep deletes none."""
        if self.args.max_checkpoints_to_keep is None or dist.get_rank():
            return None
        kept = checkpoint_directory.iterations(self.args.save)
        return int(kept[0].name[5:]) // self.args.updates_per_rollout if kept else None
