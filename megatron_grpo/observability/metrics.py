"""Metrics logger (console, files of rows in ``--save``, trackers) and phase timers.

Rank 0 writes; on other ranks a logger only checks the metrics' names. With ``--log-interval N`` a row combines the last
N updates: means, except for maxima and minima (the extreme value), positions such as ``lr`` (the last value), seconds
and counts (the sum), and rates (total tokens divided by total seconds).
"""

import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from megatron_grpo.checkpointing.checkpoint_directory import newest_in_words, room_in_words
from megatron_grpo.estimate.throughput import peak_tflops, rates
from megatron_grpo.observability import findings
from megatron_grpo.observability.metric_guide import check_names
from megatron_grpo.observability.profiling import PHASE
from megatron_grpo.observability.run_folder import read_lines
from megatron_grpo.observability.run_status import StatusFile
from megatron_grpo.observability.trackers import TABLES, build_trackers, completion_table
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.utils import progress
from megatron_grpo.utils.batch_sizes import possible_rollout_ranks
from megatron_grpo.utils.device import device_time
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import print_rank_0

_MAXIMA = {"completion/length_max", "ratio/max", "mismatch/max_abs", "memory/peak", "memory/peak_update"}
_MINIMA = {"completion/length_min", "ratio/min"}
_LAST_VALUES = {"lr", "params_norm", "tokens/total", "consumed/prompts", "consumed/left_out"}
_SUMS = {"tokens/update", "tokens/rollout", "flops/update", "reward/failures", "drafts/proposed", "drafts/accepted"}
_SUMS |= {"sft/tokens", "tokens/shared", "update/skipped", "stream/trainer_wait", "stream/engine_idle"}


class Timers:
    """Timers of the phases on this rank: ``with timers("rollout"): ...`` adds to the metric ``time/rollout``.

    Every phase runs in the context ``guard(phase)``; ``began(phase)`` is called at its start.
    """

    def __init__(
        self,
        guard: Callable[[str], AbstractContextManager] = lambda phase: contextlib.nullcontext(),
        began: Callable[[str], None] = lambda phase: None,
    ):
        self.guard, self.began = guard, began
        self.seconds: dict[str, float] = {}
        self.row_start = device_time()
        self.in_phase = False

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Context that adds its seconds to ``time/{phase}`` of METRICS; synchronizes the GPU at start and end.

        A phase within another one (the rollout of an evaluation) counts for the outer one. A phase that fails is not
        counted, because the device may not respond. Raises KeyError for an unknown phase.
        """
        check_names([f"time/{phase}"])
        if self.in_phase:
            with progress.phase(phase):
                yield
            return
        self.in_phase = True
        self.began(phase)
        start = device_time()
        try:
            with (
                progress.phase(phase),
                self.guard(phase),
                torch.profiler.record_function(PHASE + phase),
            ):  # a range for --profile
                yield
            self.seconds[phase] = self.seconds.get(phase, 0.0) + device_time() - start
        finally:
            self.in_phase = False

    def collect(self) -> dict[str, float]:
        """Return ``{"time/<phase>": seconds}`` and ``time/step`` since the last call; reset the timers."""
        now = device_time()
        row = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        row["time/step"] = now - self.row_start
        self.seconds, self.row_start = {}, now
        return row


FILES = "metrics.jsonl", "completions.jsonl", "eval_completions.jsonl"  # the last one with --valid-data-path
SECONDS_BETWEEN_LINES = 30.0  # about a rollout's progress, if the output is not a terminal
SECONDS_BETWEEN_DRAWS = 0.5  # of the progress bar


class MetricsLogger:
    """Logger that writes metrics to console, files in ``--save`` and trackers, as the arguments specify.

    ``start_iteration``: newest update before (0 for a new run; below 0 in a supervised warm-up, whose trackers count
    from 0). A resumed run keeps the rows of the files in ``--save`` up to this update and deletes later ones, because
    it writes them again. A new run empties the files.
    """

    def __init__(self, args, rank: int, total_iterations: int, start_iteration: int):
        self.args = args
        self.active = rank == 0
        self.total = total_iterations
        self.interval: list[dict] = []  # the updates since the last row
        self.iteration = start_iteration
        self.names = FILES if args.valid_data_path else FILES[:2]
        self.files: dict[str, io.FileIO] = {}
        self.unwritten = {name: bytearray() for name in self.names}  # rows for which the disk had no room
        self.failing: set[str] = set()  # files that could not be written
        self.trackers: list = []
        self.peak_tflops = peak_tflops(args)
        self.recent: deque[tuple[int, float]] = deque(maxlen=20)  # (updates, seconds) of the last rows, for the ETA
        self.written = max(0, start_iteration)  # update of the last row
        self.bar: Any = None  # tqdm's, while this logger is active
        self.judged: list[dict] = []  # what findings read of the rows so far
        self.earlier = 0  # rows of earlier launches among them
        self.split_shown = False
        self.rollout: dict[str, Any] | None = None  # progress of the rollout under way, for status.json
        self.status: StatusFile | None = None
        self.ended = False
        if not self.active:
            return
        if args.save:
            for name in self.names:
                path = Path(args.save, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                if damaged := truncate_after(path, start_iteration):
                    print_rank_0(f"{path}: {damaged} damaged lines left out")
            self.open_files()
            self.judged = [_judged(row) for row in read_lines(Path(args.save, "metrics.jsonl"))]
            self.earlier = len(self.judged)
            self.status = StatusFile(Path(args.save), self._status)
        self.first_step = args.sft_iters or 0  # of the trackers, W&B among them, which take no steps below 0
        resumed = start_iteration not in (0, -1 - self.first_step)
        self.trackers = build_trackers(args, start_iteration + self.first_step, resumed)
        # disable=None: no bar if the output is not a terminal.
        self.bar = tqdm(
            total=total_iterations,
            initial=max(0, start_iteration),
            bar_format="{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}",
            desc="training",
            disable=None,
            leave=False,
            dynamic_ncols=True,
        )

    def open_files(self) -> None:
        """Open the files in --save to append to them; again, if they were deleted."""
        for name in self.names:
            # Without Python's buffer, which loses rows on a full disk.
            self.files[name] = open(Path(self.args.save, name), "ab", buffering=0)  # noqa: SIM115

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Add the metrics of one update (a subset of METRICS); write a row every ``--log-interval`` updates.

        An evaluation before training has ``iteration`` 0, updates of a supervised warm-up have those below.
        """
        check_names(metrics)
        if not self.active:
            return
        self.bar.update(max(0, iteration) - max(0, self.iteration))
        self.iteration = iteration
        self.interval.append(metrics)
        if iteration % self.args.log_interval == 0 or iteration == self.total:
            self._write_row()
        if iteration == self.total:
            self.bar.close()  # the lines that follow, of the save and the export, start in its place

    def _status(self) -> dict[str, Any]:
        """Return the fields of status.json that this logger knows."""
        return {"update": max(0, self.iteration), "total": self.total, "rollout": self.rollout}

    def show_phase(self, phase: str) -> None:
        """Show in the progress bar what the run does now."""
        if phase not in ("rollout", "eval"):
            self.rollout = None
        if self.active and not self.bar.disable:
            self.bar.set_postfix_str(phase)

    def rollout_progress(self, num_replicas: int) -> Callable[[Sequence[Completion], int], None]:
        """Return the function that shows the progress of one rollout of rank 0's engine replica, from now on.

        Its arguments are the finished completions and the number of running ones. It draws in the progress bar, or
        prints a line every 30 seconds if the output is not a terminal.
        """
        if not self.active:
            return lambda completions, under_way: None
        began = shown = counted = time.monotonic()

        def show(completions: Sequence[Completion], under_way: int) -> None:
            nonlocal shown, counted
            now = time.monotonic()
            if now - counted < SECONDS_BETWEEN_DRAWS:
                return
            counted = now
            tokens = sum(len(completion.token_ids) for completion in completions)
            self.rollout = {"finished": len(completions), "running": under_way, "tokens": tokens}
            self.rollout |= {"replicas": num_replicas, "seconds": round(now - began, 1)}
            if self.bar.disable and now - shown < SECONDS_BETWEEN_LINES:
                return
            shown = now
            text = f"rollout {len(completions)}/{len(completions) + under_way}"
            text += f" of replica 1/{num_replicas}" if num_replicas > 1 else ""
            # Tokens of unfinished completions are not known: without a finished one a rate of 0 would look like a hang.
            text += f", {tokens / (now - began):,.0f} tokens/s" if tokens else ", none is finished yet"
            if self.bar.disable:
                print_rank_0(f"{text}, {now - began:.0f} s")
            else:
                self.bar.set_postfix_str(text)

        return show

    def log_completions(self, iteration: int, samples: list[dict], held_out: bool = False) -> None:
        """Append rows of ``completion_log`` to ``completions.jsonl``; of an evaluation to ``eval_completions.jsonl``.

        With ``--log-completions`` the trackers get a table, too. ``iteration``: first update that trains on them, or
        number of updates before the evaluation.
        """
        table = TABLES[held_out]
        if self.files:
            self._append(f"{table}.jsonl", *({"iteration": iteration} | sample for sample in samples))
        if self.args.log_completions and samples:
            self._to_trackers("log_table", iteration + self.first_step, table, *completion_table(samples))

    def flush(self) -> None:
        """Write everything to the disk (fsync); call this before a checkpoint is saved.

        An interval that a save cuts short is written as a separate row, so that a resumed run has the same rows as an
        uninterrupted one.
        """
        self._write_row()
        for name in self.files:
            self._append(name, fsync=True)
        self._to_trackers("flush")

    def close(self) -> None:
        """Flush and close; print the findings of the run; further calls are errors."""
        self.flush()
        self.end()
        for name, file in self.files.items():
            with self._file_errors(name):
                file.close()
        self._to_trackers("close")
        if self.bar is not None:
            self.bar.close()

    def end(self) -> None:
        """Write the last state of the run and print its findings, once; an error leads here without `close`."""
        if self.ended:
            return
        self.ended = True
        if self.status is not None:
            self.status.close("finished" if self.iteration >= self.total and not progress.error else "stopped")
        with contextlib.suppress(OSError):  # a terminal that is gone
            for line in findings.lines(findings.findings(self.judged, self._placed())):
                print_rank_0(line)

    def _placed(self) -> tuple[int, int] | None:
        """Return the numbers of engine ranks and trainer ranks; None if they share GPUs or drive servers."""
        args = self.args
        return (args.rollout_ranks, args.world_size) if args.rollout_ranks and args.vllm_mode != "server" else None

    def _show_split(self) -> None:
        """Print once, after the first batches, which side of --rollout-ranks waits, and a better number if any."""
        placed = self._placed()
        if self.split_shown or placed is None or self.iteration % self.args.updates_per_rollout:
            return
        split = findings.measured_split(self.judged[self.earlier :], placed, self.args.updates_per_rollout)
        if split is not None:
            self.split_shown = True
            print_rank_0(split.line(possible_rollout_ranks(self.args, sum(placed)), self.args.max_staleness))

    def _write_row(self) -> None:
        if not self.interval:
            return
        row = aggregate(self.interval)
        row |= rates(row, self.args.world_size, self.peak_tflops, self.args.include_performance_metrics)
        self.interval = []
        self.judged.append(_judged(without_nan({"iteration": self.iteration} | row)))
        if "metrics.jsonl" in self.files:
            self._append("metrics.jsonl", {"iteration": self.iteration} | row)
        remaining, with_kl = self._remaining_seconds(row), self.args.beta > 0
        for line in console_lines(self.iteration, self.total, row, remaining, terminal_width(), with_kl):
            print_rank_0(line)
        self._to_trackers("log_row", self.iteration + self.first_step, row)
        self._show_split()

    def _remaining_seconds(self, row: dict) -> float | None:
        """Return the seconds that the remaining updates take at the speed of the last rows; None without a speed."""
        if self.iteration > self.written and "time/step" in row:
            self.recent.append((self.iteration - self.written, row["time/step"]))
        self.written = max(0, self.iteration)
        updates, seconds = (sum(column) for column in zip(*self.recent)) if self.recent else (0, 0.0)
        return (self.total - self.iteration) * seconds / updates if updates else None

    def _append(self, name: str, *rows: dict, fsync: bool = False) -> None:
        """Write rows, after those for which the disk had no room before; a killed process then loses nothing."""
        unwritten = self.unwritten[name]
        for row in rows:
            # A lone surrogate is written as \udc80, which is its form in JSON.
            unwritten += (json.dumps(without_nan(row), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        with self._file_errors(name):
            while unwritten:
                del unwritten[: self.files[name].write(unwritten)]
            if fsync:
                os.fsync(self.files[name].fileno())

    def _to_trackers(self, method: str, *arguments: Any) -> None:
        """Call a method of all trackers.

        An error of a tracker, such as a full disk or a server that does not answer, ends the run only with
        --on-save-error stop: the run goes on without this tracker.
        """
        for tracker in list(self.trackers):
            try:
                getattr(tracker, method)(*arguments)
            except (OSError, *tracker.errors) as error:
                message = f"{type(tracker).__name__} cannot be written: {error}"
                if self.args.on_save_error == "stop":
                    cure = room_in_words if isinstance(error, OSError) else newest_in_words
                    raise GrpoError(f"{message}. {cure(self.args.save)}") from error
                self.trackers.remove(tracker)
                print_rank_0(f"{message}; the run goes on without it")

    @contextlib.contextmanager
    def _file_errors(self, name: str) -> Iterator[None]:
        """Context in which an error of a file, such as a full disk, ends the run only with --on-save-error stop.

        Rows stay in ``unwritten``, and are written when there is room again. The first error is printed.
        """
        try:
            yield
            self.failing.discard(name)
        except OSError as error:
            message = f"{Path(self.args.save, name)} cannot be written: {error.strerror}"
            if self.args.on_save_error == "stop":
                raise GrpoError(f"{message}. {room_in_words(self.args.save)}") from error
            if name not in self.failing:
                self.failing.add(name)
                print_rank_0(f"{message}; its rows are written when that is possible again")


def _judged(row: dict[str, Any]) -> dict[str, Any]:
    """Return what findings read of a row: a run of 10,000 updates holds this much."""
    return {name: value for name, value in row.items() if name == "iteration" or findings.wanted(name)}


def aggregate(updates: list[dict[str, float]]) -> dict[str, float]:
    """Combine the metrics of several updates into one row (rules: module docstring); names may differ by update."""
    row = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        values = [value if isinstance(value, int) else float(value) for value in values]
        if len(values) == 1 or name in _LAST_VALUES:
            row[name] = values[-1]
        elif name in _MAXIMA or re.fullmatch(r"reward/[^/]+/max", name):
            row[name] = max(values)
        elif name in _MINIMA or re.fullmatch(r"reward/[^/]+/min", name):
            row[name] = min(values)
        elif name in _SUMS or name.startswith("time/"):
            row[name] = sum(values)
        else:
            row[name] = fmean(values)
    return row


def without_nan(value):
    """Return the value with None for numbers that JSON cannot represent (nan, inf)."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def truncate_after(path: Path, iteration: int) -> int:
    """Delete the rows of a JSON-lines file with a later ``iteration`` than the given one; all rows for iteration 0.

    Updates of a supervised warm-up are below 0. Damaged lines are deleted, too; returns their number, besides the last
    one, which a killed run leaves incomplete. The file is replaced atomically.
    """
    if not path.exists():
        return 0
    temporary = path.with_name(path.name + ".tmp")
    damaged, ended = 0, True
    with open(path, encoding="utf-8", errors="replace") as old, open(temporary, "w", encoding="utf-8") as new:
        for line in old:
            ended = line.endswith("\n")
            try:
                keep = iteration != 0 and json.loads(line)["iteration"] <= iteration
            except (ValueError, KeyError, TypeError):
                damaged += ended
                continue
            if keep:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)
    return damaged


# (title, metric, format), the most important first: a narrow terminal shows those that fit.
_COLUMNS = [
    ("reward", "reward/mean", "7.4f"),
    ("kl", "kl", "8.5f"),
    ("length", "completion/length_mean", "6.1f"),
    ("entropy", "entropy", "5.3f"),
    ("grad norm", "grad_norm", "7.3f"),
    ("clip", "clip", "6.4f"),
    ("logp diff", "mismatch/mean_abs", "7.1e"),
    ("lr", "lr", "8.2e"),
]
_SFT_COLUMNS = [
    ("loss", "sft/loss", "7.4f"),
    ("tokens", "sft/tokens", "7,.0f"),
    ("grad norm", "grad_norm", "7.3f"),
    ("lr", "lr", "8.2e"),
    ("update", "time/update", "6.2f"),
]
_SECONDS = ("rollout", "scoring", "logprobs", "update", "sync")


def console_lines(
    iteration: int,
    total: int,
    row: dict[str, float],
    remaining: float | None = None,
    width: int | None = None,
    with_kl: bool = True,
) -> list[str]:
    """Return a row as console lines: one of fixed width for training metrics, those of an evaluation, if present.

    An evaluation has a line for all held-out prompts, and one for each of several files.

    ``remaining``: seconds until the end of the run. Fields that exceed ``width`` characters are left out [no limit],
    and the KL to the reference without ``with_kl``.
    """

    def cell(value, form):
        width = int(form.split(".")[0])
        return f"{'-':>{width}}" if value is None else f"{value:{form}}"

    lines = []
    position = f"{iteration:>{len(str(total))}}/{total}"
    if "sft/loss" in row and iteration < 0:
        parts = [f"{title} {row[name]:{form}}" for title, name, form in _SFT_COLUMNS if name in row]
        return [_fitting(f"warm-up {iteration}", None, parts, width)]
    if any(not name.startswith(("eval/", "time/", "memory/")) for name in row):  # an evaluation alone has these three
        values = row | ({"clip": row["clip/low"] + row["clip/high"]} if {"clip/low", "clip/high"} <= row.keys() else {})
        columns = [column for column in _COLUMNS if with_kl or column[0] != "kl"]
        parts = [f"{title} {cell(values.get(name), form)}" for title, name, form in columns]
        parts.append(" ".join(f"{phase} {cell(row.get(f'time/{phase}'), '6.2f')}" for phase in _SECONDS) + " s")
        rate = row.get("perf/tokens_per_second")
        parts.append(f"{'-' if rate is None else format(rate, ',.0f'):>7} tokens/s")
        if "perf/mfu" in row:
            parts.append(f"MFU {row['perf/mfu']:.3f}")
        eta = "-" if remaining is None else str(timedelta(seconds=round(remaining)))
        lines.append(_fitting(f"iteration {position}", f"ETA {eta:>7}", parts, width))
    evaluations: dict[str, dict[str, float]] = {}  # by the name of the file, "" for all files
    for name, value in row.items():
        if name.startswith("eval/"):
            *file, metric = name.removeprefix("eval/").split("/")
            evaluations.setdefault("".join(file), {})[metric] = value
    for name_of_file, evaluation in evaluations.items():
        accuracy_first = sorted(evaluation.items(), key=lambda item: not item[0].endswith("_accuracy"))
        results = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in accuracy_first]
        lines.append(_fitting(f"evaluation {position}{' ' * bool(name_of_file)}{name_of_file}", None, results, width))
    return lines


def _fitting(label: str, last: str | None, parts: Sequence[str], width: int | None) -> str:
    """Return label, parts and last field as a line; leave out the parts that exceed ``width`` characters."""
    kept = [label] if last is None else [label, last]
    for part in parts:
        if width is None or len(" | ".join([*kept, part])) <= width:
            kept.insert(len(kept) - (last is not None), part)
    return " | ".join(kept)


def terminal_width() -> int | None:
    """Return the width of the terminal; None if the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
