"""What a run reports: console lines, ``metrics.jsonl``, ``completions.jsonl``, trackers.py; and the phase timers.

Rank 0 writes; on the other ranks a logger checks the names it is given and does nothing else. With ``--log-interval N``
a row, in every one of these places, stands for the last N updates: means, except for maxima and minima (the extreme),
positions such as ``lr`` (the last value), seconds and counts (the sum) and rates (all tokens over all seconds).
"""

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import TextIO

import torch
from tqdm import tqdm

from megatron_grpo.estimate.throughput import peak_tflops, rates
from megatron_grpo.observability.metric_guide import check_names
from megatron_grpo.observability.profiling import PHASE
from megatron_grpo.observability.trackers import build_trackers, completion_table

_MAXIMA = {"completion/length_max", "ratio/max", "mismatch/max_abs", "memory/peak"}
_MINIMA = {"completion/length_min", "ratio/min"}
_POSITIONS = {"lr", "params_norm", "tokens/total", "consumed/prompts", "consumed/left_out"}
_SUMS = {"tokens/update", "tokens/rollout", "flops/update", "reward/failures"}


class Timers:
    """Seconds spent in each phase on this rank: ``with timers("rollout"): ...`` for METRICS' ``time/rollout``."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.row_start = _now()
        self.in_phase = False

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the block's seconds to a phase of METRICS (else KeyError); a GPU is waited for at both ends.

        Phases inside another (the rollout of an evaluation) belong to the outer one. A phase that fails is not counted:
        the device may not answer.
        """
        check_names([f"time/{phase}"])
        if self.in_phase:
            yield
            return
        self.in_phase = True
        start = _now()
        try:
            with torch.profiler.record_function(PHASE + phase):  # seen by --profile alone
                yield
            self.seconds[phase] = self.seconds.get(phase, 0.0) + _now() - start
        finally:
            self.in_phase = False

    def collect(self) -> dict[str, float]:
        """Return ``{"time/<phase>": seconds}`` since the last call, and ``time/step`` for all of it; start anew."""
        now = _now()
        row = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        row["time/step"] = now - self.row_start
        self.seconds, self.row_start = {}, now
        return row


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # kernels run asynchronously: without it their time falls to a later phase
    return time.perf_counter()


class MetricsLogger:
    """Writes metrics to every place that the arguments name; without ``--save`` no files but TensorBoard's.

    ``start_iteration`` is the number of updates done before (0 for a new run). On a resume the files in ``--save`` keep
    the rows up to it and lose the later ones, which the run is about to write again; a new run starts them afresh.
    """

    def __init__(self, args, rank: int, total_iterations: int, start_iteration: int):
        self.args = args
        self.active = rank == 0
        self.total = total_iterations
        self.interval: list[dict] = []  # the updates since the last row
        self.iteration = start_iteration
        self.files: dict[str, TextIO] = {}
        self.trackers: list = []
        self.peak_tflops = peak_tflops(args)
        self.bar = None
        if not self.active:
            return
        if args.save:
            for name in ("metrics.jsonl", "completions.jsonl"):
                path = Path(args.save, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                truncate_after(path, start_iteration)
                # A lone surrogate becomes \udc80, which is how JSON writes it anyway.
                self.files[name] = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        self.trackers = build_trackers(args, start_iteration)
        # disable=None: no bar where the output is not a terminal.
        self.bar = tqdm(
            total=total_iterations, initial=start_iteration, desc="training", unit="update", disable=None, leave=False
        )

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Take the metrics of one update (a subset of METRICS); every ``--log-interval`` updates a row goes out.

        Call it with ``iteration`` 0 for an evaluation before training.
        """
        check_names(metrics)
        if not self.active:
            return
        self.bar.update(iteration - self.iteration)
        self.iteration = iteration
        self.interval.append(metrics)
        if iteration % self.args.log_interval == 0 or iteration == self.total:
            self._write_row()

    def log_completions(self, iteration: int, samples: list[dict]) -> None:
        """Append samples (what ``completion_log.completion_row`` says of each) to ``completions.jsonl``, and with
        ``--log-completions`` show them as a table.

        ``iteration`` is the first update that trains on them.
        """
        if "completions.jsonl" in self.files:
            for sample in samples:
                self._append("completions.jsonl", {"iteration": iteration} | sample)
        if self.args.log_completions and samples:
            for tracker in self.trackers:
                tracker.log_table(iteration, *completion_table(samples))

    def flush(self) -> None:
        """Put everything on the disk; call it before a checkpoint is saved.

        An interval cut short by a save becomes a row of its own, so that a resumed run has the rows of an unbroken one.
        """
        self._write_row()
        for file in self.files.values():
            os.fsync(file.fileno())
        for tracker in self.trackers:
            tracker.flush()

    def close(self) -> None:
        """Flush and close; further calls are errors."""
        self.flush()
        for file in self.files.values():
            file.close()
        for tracker in self.trackers:
            tracker.close()
        if self.bar is not None:
            self.bar.close()

    def print(self, text: str) -> None:
        """Print a line on rank 0 without breaking the progress bar."""
        if self.active:
            tqdm.write(text)
            sys.stdout.flush()  # a pipe would hold lines back until there are many

    def _write_row(self) -> None:
        if not self.interval:
            return
        row = aggregate(self.interval)
        row |= rates(row, self.args.world_size, self.peak_tflops, self.args.include_performance_metrics)
        self.interval = []
        if "metrics.jsonl" in self.files:
            self._append("metrics.jsonl", {"iteration": self.iteration} | row)
        for line in console_lines(self.iteration, self.total, row):
            self.print(line)
        for tracker in self.trackers:
            tracker.log_row(self.iteration, row)
        if "reward/mean" in row:
            self.bar.set_postfix_str(f"reward {row['reward/mean']:.4f}")

    def _append(self, name: str, row: dict) -> None:
        # To the operating system at once, so that a killed process loses nothing; to the disk in flush().
        self.files[name].write(json.dumps(_without_nan(row), ensure_ascii=False) + "\n")
        self.files[name].flush()


def aggregate(updates: list[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of several updates into one row, as the head of this module says; some may lack a name."""
    row = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        values = [value if isinstance(value, int) else float(value) for value in values]
        if len(values) == 1 or name in _POSITIONS:
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


def _without_nan(value):
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def truncate_after(path: Path, iteration: int) -> None:
    """Keep the rows of a JSON-lines file whose ``iteration`` is at most the given one; none for iteration 0.

    A line torn by a kill is dropped. The file is replaced in one step.
    """
    if not path.exists():
        return
    temporary = path.with_name(path.name + ".tmp")
    with open(path, encoding="utf-8", errors="replace") as old, open(temporary, "w", encoding="utf-8") as new:
        for line in old:
            try:
                row_iteration = json.loads(line)["iteration"]
            except (ValueError, KeyError, TypeError):
                continue
            if iteration > 0 and row_iteration <= iteration:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)


_COLUMNS = [
    ("reward", "reward/mean", "7.4f"),
    ("kl", "kl", "8.5f"),
    ("length", "completion/length_mean", "7.1f"),
    ("entropy", "entropy", "6.3f"),
    ("grad norm", "grad_norm", "7.3f"),
    ("clip", "clip", "6.4f"),
    ("logp diff", "mismatch/mean_abs", "7.1e"),
    ("lr", "lr", "8.2e"),
]
_SECONDS = ("rollout", "scoring", "logprobs", "update", "sync")


def console_lines(iteration: int, total: int, row: dict[str, float]) -> list[str]:
    """Format a row for people: a line of fixed width for training and one for evaluation, whichever the row has."""

    def cell(value, form):
        width = int(form.split(".")[0])
        return f"{'-':>{width}}" if value is None else f"{value:{form}}"

    lines = []
    label = f"iteration {iteration:>{len(str(total))}}/{total}"
    if any(not name.startswith(("eval/", "time/")) for name in row):
        values = row | ({"clip": row["clip/low"] + row["clip/high"]} if {"clip/low", "clip/high"} <= row.keys() else {})
        parts = [f"{title} {cell(values.get(name), form)}" for title, name, form in _COLUMNS]
        parts.append(" ".join(f"{phase} {cell(row.get(f'time/{phase}'), '6.2f')}" for phase in _SECONDS) + " s")
        rate = row.get("perf/tokens_per_second")
        parts.append(f"{'-' if rate is None else format(rate, ',.0f'):>7} tokens/s")
        if "perf/mfu" in row:
            parts.append(f"MFU {row['perf/mfu']:.3f}")
        lines.append(" | ".join([label, *parts]))
    evaluation = {name: value for name, value in row.items() if name.startswith("eval/")}
    if evaluation:
        results = " | ".join(f"{name[5:].replace('_', ' ')} {value:.4f}" for name, value in evaluation.items())
        lines.append(f"{label} | evaluation | {results}")
    return lines
