"""Profiles of some updates (``--profile``), with PyTorch's profiler or Nsight Systems; the flags are Megatron-LM's."""

import gc
import gzip
import json
import os
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_grpo.utils.log import log

PHASE = "phase/"  # prefix of the profiler range that Timers opens for each phase
ROWS = 30  # of each table
PHASES = 3  # with a table of kernels of their own
# Categories of the trace.
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}


class Profiler:
    """Profiler of the updates between --profile-step-start and --profile-step-end, on --profile-ranks.

    PyTorch's profiler writes ``rank<R>.trace.json.gz`` (for Perfetto or chrome://tracing), ``rank<R>.txt``, tables of
    phases, kernels (also of single phases) and operators, and ``rank<R>.phases.json``, the phases for tools/report.py.
    Without --use-pytorch-profiler, CUDA's profiler range is started and stopped, for ``nsys profile --capture-range
    cudaProfilerApi``.
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
            try:
                self._write(self.recording)
            except (OSError, ValueError) as error:
                directory = Path(self.args.save, "profile")
                with suppress(OSError):
                    for path in directory.glob(f"rank{self.rank}.*"):  # checkpoints and metrics need the room
                        os.truncate(path, 0)  # PyTorch keeps a trace open that it could not write
                        path.unlink()
                # PyTorch raises nothing if it cannot write its trace.
                cut_off = isinstance(error, (FileNotFoundError, ValueError))
                reason = "its trace is not whole, as on a full disk" if cut_off else error
                log(f"the profile cannot be written to {directory}: {reason}")
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
        with _no_garbage_collection():
            events = [event for event in json.loads(content)["traceEvents"] if event.get("ph") == "X"]
            found, tables = phases(events), kernels_and_operators(events)
            del events
        updates = [self.args.profile_step_start + 1, self.args.profile_step_end]
        lines = ["updates {} to {}".format(*updates), "", *(phase.line() for phase in found), *tables]
        (directory / f"rank{self.rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        summary = {"rank": self.rank, "updates": updates, "phases": [asdict(phase) for phase in found]}
        (directory / f"rank{self.rank}.phases.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
        trace.with_suffix(".json.gz").write_bytes(gzip.compress(content, compresslevel=1))
        trace.unlink()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause Python's collector, which would visit all events again and again while they are read."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Phase:
    """Seconds of all calls of a phase. Those of the device are None in a trace without one; the last three add up.

    ``busy`` is the time in which the device ran anything, ``communication`` that in which it ran NCCL's kernels, and
    ``only_communication`` the part of it in which it ran nothing else. ``waiting`` is the time in which it was idle
    because the host had not launched what came next, ``idle`` the other idle time (launch latency, dependencies).
    """

    name: str
    calls: int
    seconds: float
    communication: float | None = None
    only_communication: float | None = None
    busy: float | None = None
    waiting: float | None = None
    idle: float | None = None

    def line(self) -> str:
        """Return the phase as one line of text."""
        line = f"{self.name:12s} {self.seconds:10.3f} s in {self.calls} calls"
        if self.busy is None:
            return line
        return (
            f"{line}: busy {self.busy:.3f} (communication {self.communication:.3f}, "
            f"{self.only_communication:.3f} of it alone), "
            f"waiting for launches {self.waiting:.3f}, idle otherwise {self.idle:.3f}"
        )


def phases(events: list[dict[str, Any]]) -> list[Phase]:
    """Return the phases of a trace's complete events (``ph`` X, microseconds), the longest first.

    A phase has what the device did between the begin and the end of each of its calls.
    """
    kernels = [event for event in events if event.get("cat") in ON_DEVICE]
    found = []
    if kernels:
        busy, waiting = _Spans.of(kernels), _waiting(kernels, events)
        communication = _Spans.of([kernel for kernel in kernels if kernel["name"].startswith("nccl")])
        computation = _Spans.of([kernel for kernel in kernels if not kernel["name"].startswith("nccl")])
    for name, spans in _calls(events).items():
        seconds = sum(end - begin for begin, end in spans) / 1e6
        if not kernels:
            found.append(Phase(name, len(spans), seconds))
            continue
        used, nccl, other, late = (
            sum(of.between(*span) for span in spans) / 1e6 for of in (busy, communication, computation, waiting)
        )
        found.append(Phase(name, len(spans), seconds, nccl, used - other, used, late, seconds - used - late))
    return sorted(found, key=lambda phase: -phase.seconds)


def _calls(events: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return begin and end of each call of every phase, in microseconds."""
    calls: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith(PHASE):
            calls[event["name"].removeprefix(PHASE)].append((event["ts"], event["ts"] + event["dur"]))
    return calls


def kernels_and_operators(events: list[dict[str, Any]]) -> list[str]:
    """Return tables of a trace: kernels, those of the phases with most time in kernels, and operators.

    The kernels of a phase begin during one of its calls. Operators are without the operators that they call.
    """
    kernels = sorted((event for event in events if event.get("cat") in ON_DEVICE), key=lambda event: event["ts"])
    times = [(kernel["name"], kernel["dur"]) for kernel in kernels]
    begins, of_phases = np.array([kernel["ts"] for kernel in kernels]), {}
    for phase, spans in _calls(events).items():
        of_phases[phase] = [time for first, end in np.searchsorted(begins, spans) for time in times[first:end]]
    tables = _table("kernel", times)
    for phase in sorted(of_phases, key=lambda phase: -sum(time for _, time in of_phases[phase]))[:PHASES]:
        tables += _table(f"kernel in {phase}", of_phases[phase])
    return [*tables, *_table("operator, CPU time of its own", _own_times(events))]


@dataclass(frozen=True)
class _Spans:
    """Spans of time that do not overlap, in order."""

    begins: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, events: list[dict[str, Any]]) -> "_Spans":
        """Return the time in which at least one of the events ran."""
        begins = np.array([event["ts"] for event in events])
        order = np.argsort(begins, kind="stable")
        begins = begins[order]
        ends = np.maximum.accumulate(begins + np.array([event["dur"] for event in events])[order])
        first = np.ones(len(begins), bool)  # of a span: it begins after all before it have ended
        first[1:] = begins[1:] > ends[:-1]
        return cls(begins[first], ends[np.roll(first, -1)])

    def between(self, begin: float, end: float) -> float:
        """Return the time between two points of time."""
        return float((np.clip(self.ends, begin, end) - np.clip(self.begins, begin, end)).sum())


def _waiting(kernels: list[dict[str, Any]], events: list[dict[str, Any]]) -> _Spans:
    """Return the time in which the device was idle and the launch of its next kernel had not returned."""
    launched = {
        event["args"]["correlation"]: event["ts"] + event["dur"]
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", ())
    }
    busy = _Spans.of(kernels)
    # Of kernels that begin at the same time any will do.
    correlation = {kernel["ts"]: kernel.get("args", {}).get("correlation") for kernel in kernels}
    idle_from = np.append(-np.inf, busy.ends)
    launch = np.array([launched.get(correlation[begin], begin) for begin in busy.begins])
    until = np.append(np.minimum(launch, busy.begins), np.inf)
    return _Spans(idle_from, np.maximum(idle_from, until))


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
    """Return a table of names (seconds, calls, microseconds a call, share of all seconds); [] without a name."""
    total: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, time in times:
        total[name] += time
        calls[name] += 1
    whole = sum(total.values()) or 1.0
    lines = ["", f"{'seconds':>12} {'calls':>8} {'us/call':>10} {'share':>6}  {title}"] if total else []
    for name, time in sorted(total.items(), key=lambda item: -item[1])[:ROWS]:
        lines.append(f"{time / 1e6:>12.6f} {calls[name]:>8} {time / calls[name]:>10.1f} {time / whole:>6.1%}  {name}")
    return lines
