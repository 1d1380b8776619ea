"""Updates that would damage the model: a loss or a gradient norm that is not finite, or far above the last ones.

They are found between the backward pass and the optimizer, so the parameters are still those of the update before.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.checkpointing.checkpoint_directory import LATEST, iterations, newest_in_words
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.share import first_holders
from megatron_grpo.patches import megatron_core as core
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import print_rank_0

ENOUGH = 20  # updates before which no spike is detected
WINDOW = 100  # updates of the medians
IN_A_ROW = 5  # bad updates that end the run, also with skip and restore
DIRECTORY = "bad_updates"  # in --save
FOLLOWS = "it follows a bad update of the same rollout"


class BadUpdates:
    """The optimizer's step with a check before it, and --on-bad-update.

    A spike is a gradient norm above ``factor`` times the median of the last updates, or a loss whose absolute value is
    above ``factor`` times their median and 1; None: only values that are not finite are bad. The medians leave out
    updates without a gradient: those of a loss scale that overflows, and of groups whose rewards are all equal.
    """

    def __init__(self, action: str, factor: float | None, save: str | Path | None):
        self.action, self.factor, self.save = action, factor, save
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.problem: str | None = None  # of the newest update
        self.further_norm = 0.0  # of the newest update
        self.spoiled = ""  # a parameter that was not finite before the newest update, if that is bad
        self.in_a_row = 0  # without those that only follow a bad update until the restore
        self.restore_due = False  # at the end of the rollout; its other updates are skipped, too

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to judge as an uninterrupted one."""
        return {"norms": list(self.norms), "losses": list(self.losses), "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; {}: of a checkpoint that has none."""
        self.norms.extend(state.get("norms", []))
        self.losses.extend(state.get("losses", []))
        self.in_a_row = state.get("in_a_row", 0)

    def forget(self) -> None:
        """Forget the updates so far: those that follow have another loss."""
        self.norms.clear()
        self.losses.clear()
        self.in_a_row = 0

    def step(self, optimizer, loss: float, further_norm: Callable[[], float] | None = None) -> tuple[bool, float]:
        """Run ``optimizer.step()`` unless the update is bad; return (done, gradient norm) and set ``problem``.

        ``further_norm`` returns the norm of the gradients that this norm leaves out.
        Collective. megatron-core's step computes the norm and changes the weights in one call: here the change follows
        after the judgement.
        """
        reached = False

        def postpone() -> bool:
            nonlocal reached
            reached = True
            return True

        self.problem = None
        smallest = _smallest_loss_scale(optimizer)
        with core.STEP.replaced_on(optimizer, postpone):
            updated, found_norm, _ = optimizer.step()
        norm = float(found_norm or 0.0)
        if reached:
            self.further_norm = further_norm() if further_norm else 0.0
            self.problem = self._agreed(self._judge(loss, norm))
            updated = optimizer.step_with_ready_grads() if self.problem is None else False
        overflow = found_norm is None  # megatron-core leaves the update out, and lowers the loss scale of fp16
        if overflow:
            self.problem = self._judge_overflow(loss, smallest)
        if self.problem is not None:
            self.in_a_row += not self.restore_due
        elif not overflow:
            self.in_a_row = 0
            if norm > 0:
                self.norms.append(norm)
                self.losses.append(abs(loss))
        return updated, norm

    def _judge_overflow(self, loss: float, smallest: bool) -> str | None:
        """Return what is wrong if gradients overflow float16, or None if a smaller loss scale is the cure."""
        if self.restore_due:
            return FOLLOWS
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return "the gradients overflow float16 at the smallest loss scale" if smallest else None

    def _judge(self, loss: float, norm: float) -> str | None:
        """Return what is wrong with an update, or None."""
        if self.restore_due:
            return FOLLOWS
        further = "gradient norm of the multi-token-prediction layers"
        for name, value in (("loss", loss), ("gradient norm", norm), (further, self.further_norm)):
            if not math.isfinite(value):
                return f"the {name} is {value}"
        if self.factor is None or len(self.norms) < ENOUGH:
            return None
        usual_norm, usual_loss = median(self.norms), max(1.0, median(self.losses))
        if norm > self.factor * usual_norm:
            return f"the gradient norm is {norm:.4g}, {norm / max(usual_norm, 1e-30):.1f} times the median"
        if abs(loss) > self.factor * usual_loss:
            return f"the loss is {loss:.4g}, {abs(loss) / usual_loss:.1f} times the usual size"
        return None

    @staticmethod
    def _agreed(problem: str | None) -> str | None:
        """Return a problem on every rank if one rank has one. Collective."""
        bad = torch.tensor(float(problem is not None), device=device())
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        return problem or ("another rank has found a bad value" if bad else None)

    def look_at(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """After a bad update, find a parameter of any rank with a value that is not finite. Collective."""
        self.spoiled = ""
        if self.problem is None:
            return
        mine = next((name for name, value in parameters if value.numel() and not _is_finite(value.detach())), "")
        found: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        self.spoiled = next(filter(None, found), "")

    def react(self, iteration: int, batch: RolloutBatch, completions: np.ndarray, metrics: dict[str, float]) -> None:
        """Write the batch of a bad update ``iteration`` and print a line; GrpoError with --on-bad-update stop."""
        if self.problem is None:
            return
        where = self._write(iteration, batch, completions, metrics)
        what = f"update {iteration} is bad: {self.problem}{where}"
        if self.action == "stop" or self.in_a_row >= IN_A_ROW:
            many = f" It is the {self.in_a_row}th in a row." if self.in_a_row >= IN_A_ROW > 1 else ""
            if self.spoiled:
                raise GrpoError(f"{what}.{many} {self._cure_of_parameters()}")
            raise GrpoError(
                f"{what}.{many} The parameters are those before it. {newest_in_words(self.save)}; "
                "--on-bad-update skip or restore goes on without it, and tools/replay_update.py finds the completion"
            )
        if not self.restore_due:
            print_rank_0(f"{what}; it is skipped (--on-bad-update {self.action})")
        self.restore_due = self.action == "restore"

    def _cure_of_parameters(self) -> str:
        """Return what to do about parameters that are not finite: no other batch helps."""
        found = f"The parameters before it are not finite already ({self.spoiled}): "
        cure = "lower --lr, or set --clip-grad, and look whether the weights that the run started from are finite. "
        newest = newest_in_words(self.save)
        if not self.save or not iterations(self.save):
            return f"{found}{cure}{newest}"
        return (
            f"{found}{cure}{newest}; if that ends here again, this checkpoint has these values: write the number of an "
            f"earlier one into {Path(self.save, LATEST)}"
        )

    def _write(self, iteration: int, batch: RolloutBatch, completions: np.ndarray, metrics: dict[str, float]) -> str:
        """Write rollout, completions of the update and metrics; return the end of a sentence about the files.

        Each rank writes the completions of which it is the first holder. A full disk ends no run.
        """
        if not self.save or self.restore_due:
            return ""
        directory = Path(self.save, DIRECTORY, f"iteration_{iteration:07d}")
        mine = np.flatnonzero(first_holders(batch) == dist.get_rank())
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if len(mine):
                part = replace(batch.select(mine), all_lengths=None, all_response_lengths=None)
                part.save(directory / f"{dist.get_rank():05d}.npz")
            if dist.get_rank() == 0:
                values = {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}
                record = {"iteration": iteration, "problem": self.problem, "completions": completions.tolist()}
                directory.with_suffix(".json").write_text(json.dumps(record | {"metrics": values}, indent=1) + "\n")
        except OSError as error:
            return f" (its batch cannot be written to {directory}: {error})"
        return f" (its batch: {directory})"


def _is_finite(value: torch.Tensor) -> bool:
    least, largest = value.aminmax()  # NaN if one value is
    return bool(least.isfinite() and largest.isfinite())


def _smallest_loss_scale(optimizer) -> bool:
    """Return whether an overflow cannot lower the optimizer's loss scale: it is --loss-scale or --min-loss-scale."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    scalers = [scaler for part in parts if (scaler := getattr(part, "grad_scaler", None)) is not None]
    return all(float(scaler.scale) <= float(getattr(scaler, "min_scale", scaler.scale)) for scaler in scalers)
