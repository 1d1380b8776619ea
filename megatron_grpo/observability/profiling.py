"""Profiles of some updates (``--profile``), with PyTorch's profiler or Nsight Systems; the flags are Megatron-LM's."""

import gzip
import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

PHASE = "phase/"  # prefix of the profiler range that Timers opens for each phase
ROWS = 30  # of each table
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of the trace


class Profiler:
    """Profiler of the updates between --profile-step-start and --profile-step-end, on --profile-ranks.

    PyTorch's profiler writes ``rank<R>.trace.json.gz`` (for Perfetto or chrome://tracing) and ``rank<R>.txt``, tables
    of phases, kernels and operators. Without --use-pytorch-profiler, CUDA's profiler range is started and stopped, for
    ``nsys profile --capture-range cudaProfilerApi``.
    """

    def __init__(self, args: Namespace, rank: int, iteration: int):
        self.args, self.rank = args, rank
        self.wanted = args.profile and rank in (args.profile_ranks or [0])
        self.recording: torch.profiler.profile | bool = False
        self.after(iteration)

    def after(self, iteration: int) -> None:
        """Start or end the recording after update ``iteration``."""
        if self.wanted and not self.recording and iteration == self.args.profile_step_start:
            self._begin()
        elif self.recording and iteration >= self.args.profile_step_end:
            self.close()

    def close(self) -> None:
        """End the current recording, if any, and write it."""
        if isinstance(self.recording, torch.profiler.profile):
            self.recording.stop()
            self._write(self.recording)
        elif self.recording:
            torch.cuda.profiler.stop()
        self.recording = False

    def _begin(self) -> None:
        if self.args.use_pytorch_profiler:
            self.recording = torch.profiler.profile()  # records all activities that this machine supports
            self.recording.start()
        else:
            torch.cuda.profiler.start()
            self.recording = True

    def _write(self, recorded: torch.profiler.profile) -> None:
        directory = Path(self.args.save, "profile")
        directory.mkdir(exist_ok=True)
        trace = directory / f"rank{self.rank}.trace.json"
        recorded.export_chrome_trace(str(trace))
        content = trace.read_bytes()
        # From the trace: torch's key_averages takes many times longer for an update of 40,000 kernels.
        lines = [f"updates {self.args.profile_step_start + 1} to {self.args.profile_step_end}", ""]
        lines += summary(json.loads(content)["traceEvents"])
        (directory / f"rank{self.rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        trace.with_suffix(".json.gz").write_bytes(gzip.compress(content, compresslevel=1))
        trace.unlink()


def summary(events: Iterable[dict[str, Any]]) -> list[str]:
    """Return tables of phases, kernels and operators from the ``traceEvents`` of PyTorch's profiler (microseconds).

    A phase lists what the device did between its begin and its end. Operators have the time without that of the
    operators that they call.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") in ON_DEVICE]
    busy, communicating = _Busy(kernels), _Busy([k for k in kernels if k["name"].startswith("nccl")])
    phases: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for event in complete:
        if event.get("cat") == "user_annotation" and event["name"].startswith(PHASE):
            begin, end = event["ts"], event["ts"] + event["dur"]
            found = event["dur"], busy.between(begin, end), communicating.between(begin, end)
            phases[event["name"].removeprefix(PHASE)].append(found)
    lines = []
    totals = {name: [sum(column) / 1e6 for column in zip(*found, strict=True)] for name, found in phases.items()}
    for name, (seconds, used, communication) in sorted(totals.items(), key=lambda item: -item[1][0]):
        line = f"{name:12s} {seconds:10.3f} s in {len(phases[name])} calls"
        if kernels:
            line += f", device busy {used:.3f} s (communication {communication:.3f}), idle {seconds - used:.3f}"
        lines.append(line)
    if kernels:
        lines += _table("kernel", ((kernel["name"], kernel["dur"]) for kernel in kernels))
    return lines + _table("operator, CPU time of its own", _own_times(complete))


class _Busy:
    """Time in which at least one of the events ran."""

    def __init__(self, events: list[dict[str, Any]]):
        self.begins: list[float] = []
        self.ends: list[float] = []
        for event in sorted(events, key=itemgetter("ts")):
            end = event["ts"] + event["dur"]
            if self.ends and event["ts"] <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.begins.append(event["ts"])
                self.ends.append(end)

    def between(self, begin: float, end: float) -> float:
        """Return the time between two points of time."""
        return float((np.clip(self.ends, begin, end) - np.clip(self.begins, begin, end)).sum())


def _own_times(events: list[dict[str, Any]]) -> Iterable[tuple[str, float]]:
    """Return (name, time without the operators that it calls) of every operator on the CPU."""
    found: list[list[Any]] = []
    running: dict[Any, list[tuple[float, int]]] = defaultdict(list)  # (end, place in found) for each thread
    operators = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        stack = running[event["tid"]]
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        if stack:
            found[stack[-1][1]][1] -= event["dur"]
        stack.append((event["ts"] + event["dur"], len(found)))
        found.append([event["name"], event["dur"]])
    return ((name, time) for name, time in found if not name.startswith(PHASE))


def _table(title: str, times: Iterable[tuple[str, float]]) -> list[str]:
    """Return a table of names: milliseconds, calls, and share of the time of all names."""
    total: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, time in times:
        total[name] += time
        calls[name] += 1
    whole = sum(total.values()) or 1.0
    lines = ["", f"{'ms':>12} {'calls':>8} {'share':>6}  {title}"]
    for name, time in sorted(total.items(), key=lambda item: -item[1])[:ROWS]:
        lines.append(f"{time / 1e3:>12.3f} {calls[name]:>8} {time / whole:>6.1%}  {name}")
    return lines
