"""Pool of worker processes for reward functions.

A function that hangs, crashes or returns an invalid value affects only one sample or group.
"""

import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_readable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from megatron_grpo.rewards.registry import Sample
from megatron_grpo.rewards.reward_models.arguments import RewardModelSpec
from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import log
from megatron_grpo.utils.process_tree import end_supervised, start_supervised

_CHUNK = 64  # calls per message: makes the cost of a message small
_START_LIMIT = 120.0  # s, for imports on a slow disk
REWARD_MODEL_TIMEOUTS = (
    3  # time limit of a call to a reward model with all its retries, in units of --reward-model-timeout
)
_MAX_REPORT = 2**26  # bytes of a report
_MAX_TIMEOUTS = 4  # a function with so many time-outs and no value ends the run
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_MAX_FAILED = 64  # a function that has failed on so many samples of a stream, and has no value, ends the run


@dataclass(frozen=True)
class Failure:
    """A missing reward: the function, the key and row of the sample, the reason, the beginning of the completion."""

    reward: str
    key: Hashable
    source: str
    reason: str
    completion: str
    traceback: str = ""


def print_first_failures(failures: Iterable[Failure], printed: set[str]) -> None:
    """Print the first failure of each reward that is not in ``printed``, and add its name there."""
    for failure in failures:
        if failure.reward not in printed:
            printed.add(failure.reward)
            log(
                f"reward {failure.reward} could not score {failure.source}: {failure.reason} (completion "
                f"{failure.completion!r}); such completions count as not scored, see reward/failures"
            )


class GroupMember(NamedTuple):
    """The group of a sample: all completions of one prompt, which a group-wise function scores in one call."""

    group: int
    place: int  # of the completion in its group
    size: int


@dataclass(eq=False)
class _Kind:
    """Worker processes of one kind: for functions (one call at a time) or for models (concurrent calls)."""

    module: str
    functions: dict[int, Any]  # function number -> its name, or the specification of a model
    count: int
    limit: float  # time-out in s: a process with calls and without a report for so long is stuck
    start_limit: float = _START_LIMIT
    concurrent: bool = False
    # (sample number, function numbers); the sample number of group-wise functions is that of the group's last sample.
    queue: deque[tuple[int, tuple[int, ...]]] = field(default_factory=deque)


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    kind: _Kind
    ready: bool = False
    last_report: float = field(default_factory=time.monotonic)
    unread: bytes = b""
    # Calls that the process has received and not reported, in order: (sample number, function number).
    calls: dict[tuple[int, int], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.tasks, self.reports = self.process.stdin, self.process.stdout.fileno()


class RewardPool:
    """Scores samples with the functions of ``names`` in ``workers`` processes, each call within ``timeout`` seconds.

    The processes are spawned (not forked: the trainer has threads) and import only the rewards and the plug-ins. A
    call that raises, times out, returns anything but a finite number or None, or kills its process is retried
    ``retries`` times; then the reward is NaN, as for None, and a ``Failure`` gives the reason. GrpoError ends the run:
    when a function raises one (wrong data), and when a function failed on every sample that it had to score.

    A group-wise function is called once for a group, as soon as all its samples are submitted. A failure of the call is
    a failure of each sample of the group. Incomplete groups are not scored.

    ``flags`` fill keyword-only parameters of the functions. ``routes`` maps a "data_source" to the functions that score
    its rows (default: all functions score all rows); rewards of other functions are NaN. Values are clipped to
    +-``clip``. A value that could overflow the float32 sum over functions with ``weights`` is a fault, too; advantages
    are at most twice that sum. Names in ``models`` are reward models: one further process queries them, with
    concurrent calls; it receives ``flags`` too.
    """

    def __init__(
        self,
        names: Sequence[str],
        plugins: Sequence[str | Path] = (),
        workers: int = 1,
        timeout: float = 10.0,
        retries: int = 1,
        flags: Mapping[str, Any] | None = None,
        routes: Mapping[str, Sequence[str]] | None = None,
        clip: float | None = None,
        models: Mapping[str, RewardModelSpec] | None = None,
        weights: Sequence[float] | None = None,
    ):
        self.names, self.timeout, self.retries = list(names), timeout, retries
        self._clip = math.inf if clip is None else clip
        self._weights = [1.0] * len(self.names) if weights is None else weights
        self._all_functions = tuple(range(len(self.names)))
        self._group_wise: set[int] = set()  # function numbers, as the workers report them
        self._routes = {source: tuple(map(self.names.index, route)) for source, route in (routes or {}).items()}
        self.failures: list[Failure] = []  # of the samples that the last finish() returned
        self._setup = ([Path(p).resolve() for p in plugins], flags or {}, [p or os.getcwd() for p in sys.path])
        models = models or {}
        specs = {number: models[name] for number, name in enumerate(self.names) if name in models}
        functions = {number: name for number, name in enumerate(self.names) if name not in models}
        model_limit = REWARD_MODEL_TIMEOUTS * (flags or {}).get("reward_model_timeout", 0.0)
        kinds = [
            _Kind("megatron_grpo.rewards.worker", functions, workers, timeout),
            _Kind(
                "megatron_grpo.rewards.reward_models.worker",
                specs,
                1,
                model_limit,
                _START_LIMIT + model_limit,
                concurrent=True,
            ),
        ]
        self._kinds = [kind for kind in kinds if kind.functions]
        self._failed_starts = 0
        self._last_poll = 0.0
        self._clear()
        self._workers: list[_Worker] = []
        self.close = weakref.finalize(self, end_supervised, self._workers, os.getpid())  # called at exit at the latest
        self._workers += [self._start(kind) for kind in self._kinds for _ in range(kind.count)]
        while not all(worker.ready for worker in self._workers):
            self.poll(0.1)

    def _clear(self) -> None:
        self._samples: dict[Hashable, int] = {}  # key -> number
        self._next_number = 0
        self._rows: dict[int, tuple[Hashable, Sample, list[float]]] = {}  # by number
        self._groups: dict[Hashable, dict[int, int]] = {}  # of incomplete groups: place -> sample number
        self._members: dict[int, list[int]] = {}  # of complete groups: the last sample's number -> all, by place
        self._pending = 0  # number of missing rewards
        self._missing: dict[int, int] = {}  # sample number -> number of missing rewards
        self._tries: dict[tuple[int, int], int] = {}
        self._failures_by_function: list[list[Failure]] = [[] for _ in self.names]
        self._timeouts = [0] * len(self.names)
        self._succeeded = [0] * len(self.names)
        self._failed_in_a_row = [0] * len(self.names)  # samples since the last value
        self._requested = [0] * len(self.names)

    def score(self, samples: Sequence[Sample], group_size: int = 1) -> tuple[np.ndarray, list[Failure]]:
        """Return rewards float32 ``[len(samples), len(names)]`` (NaN: None or failed) and the failures among them.

        Each ``group_size`` consecutive samples form a group.
        """
        for key, sample in enumerate(samples):
            self.submit(key, sample, GroupMember(key // group_size, key % group_size, group_size))
        return self.finish(), self.failures

    def submit(self, key: Hashable, sample: Sample, member: GroupMember | None = None) -> None:
        """Submit one sample without waiting for its rewards; ``finish`` identifies it by the key.

        Without ``member`` the sample is a group of its own. No function scores a sample with the finish reason "failed"
        (an environment failed); a group-wise function gets the others of its group.
        """
        number = self._add(key, sample, [math.nan] * len(self.names))
        functions = self._functions_of(sample)
        failed = sample.finish_reason == "failed"
        self._missing[number] = 0 if failed else len(functions)
        if not failed:
            self._enqueue(number, [function for function in functions if function not in self._group_wise])
        group_wise = [function for function in functions if function in self._group_wise]
        if group_wise:
            group, place, size = member or ((key,), 0, 1)
            members = self._groups.setdefault(group, {})
            members[place] = number
            if len(members) == size:
                of_group = [members[i] for i in sorted(self._groups.pop(group))]
                self._members[number] = [i for i in of_group if self._rows[i][1].finish_reason != "failed"]
                if self._members[number]:
                    self._enqueue(number, group_wise)
        if time.monotonic() - self._last_poll > 0.01:
            self.poll()

    def give(self, key: Hashable, sample: Sample, rewards: Sequence[float]) -> None:
        """Submit one sample whose rewards are known."""
        self._missing[self._add(key, sample, [float(reward) for reward in rewards])] = 0

    def _add(self, key: Hashable, sample: Sample, rewards: list[float]) -> int:
        """Return the number of a new sample."""
        assert key not in self._samples, f"two samples with the key {key!r}"
        number = self._samples[key] = self._next_number
        self._next_number += 1
        self._rows[number] = key, sample, rewards
        return number

    def _enqueue(self, number: int, functions: list[int]) -> None:
        for kind in self._kinds:
            if numbers := tuple(function for function in functions if function in kind.functions):
                kind.queue.append((number, numbers))
        for function in functions:
            size = len(self._samples_of(number, function))
            self._pending += size
            self._requested[function] += size

    def _samples_of(self, number: int, function: int) -> list[int]:
        """Return the numbers of the samples that a call scores."""
        return self._members[number] if function in self._group_wise else [number]

    def finish(self, keys: Sequence[Hashable] | None = None) -> np.ndarray:
        """Wait for every sample submitted since the last call; return rewards float32 ``[n, len(names)]``.

        Rows are in the order of ``keys``, or of submission. ``failures`` then lists the missing rewards.
        """
        while self._pending:
            self.poll(0.2)
        incomplete = [key for key in keys or () if self._missing[self._samples[key]]]
        assert not incomplete, f"samples {incomplete} belong to incomplete groups"
        for function, failed in enumerate(self._failures_by_function):
            if failed and len(failed) == self._requested[function]:
                self._stop(function, f"failed on all {len(failed)} samples")
        values = self._rewards(self._rows if keys is None else [self._samples[key] for key in keys])
        self.failures = sorted(
            (f for failed in self._failures_by_function for f in failed), key=lambda f: self._samples[f.key]
        )
        self._clear()
        return values

    def take(self, keys: Sequence[Hashable], batch_size: int | None) -> tuple[np.ndarray, list[Failure]] | None:
        """Return the rewards of these samples, whole groups, and the failures among them; None while one is missing.

        The samples are then forgotten: this is for a stream of groups, which `finish` would end. As there a function
        that fails on a whole batch ends the run: on ``batch_size`` samples in a row, or on all of ``keys`` if it is
        None, which are a batch then; and a function that has failed on the first `_MAX_FAILED` samples of the stream.
        """
        numbers = [self._samples[key] for key in keys]
        if any(self._missing[number] for number in numbers):
            return None
        own = set(keys)
        values, failures = self._rewards(numbers), []
        for function, failed in enumerate(self._failures_by_function):
            if len(failed) >= _MAX_FAILED and not self._succeeded[function]:
                self._stop(function, f"failed on all {len(failed)} samples")
            if failed and batch_size is not None and self._failed_in_a_row[function] >= batch_size:
                self._stop(function, f"failed on the last {self._failed_in_a_row[function]} samples")
            of_keys = sum(failure.key in own for failure in failed)
            if batch_size is None and 0 < of_keys == self._num_scored_by(function, numbers):
                self._stop(function, f"failed on all {of_keys} samples")
            failures += [failure for failure in failed if failure.key in own]
            if self._succeeded[function]:
                failed[:] = [failure for failure in failed if failure.key not in own]
        for key, number in zip(keys, numbers, strict=True):
            del self._samples[key], self._rows[number], self._missing[number]
            self._members.pop(number, None)
            for function in self._all_functions:
                self._tries.pop((number, function), None)
        return values, failures

    def _num_scored_by(self, function: int, numbers: Sequence[int]) -> int:
        """Return how many of these samples a function has to score."""
        samples = [self._rows[number][1] for number in numbers]
        return sum(function in self._functions_of(s) for s in samples if s.finish_reason != "failed")

    def _functions_of(self, sample: Sample) -> Sequence[int]:
        return self._routes[sample.row["data_source"]] if self._routes else self._all_functions

    def _rewards(self, numbers: Iterable[int]) -> np.ndarray:
        """Return the rewards of samples, float32 ``[len(numbers), len(names)]``."""
        return np.array([self._rows[number][2] for number in numbers], np.float32).reshape(-1, len(self.names))

    def wait(self, keys: Sequence[Hashable]) -> np.ndarray:
        """Wait for these samples, whose groups are complete; return rewards float32 ``[len(keys), len(names)]``.

        The samples stay submitted.
        """
        numbers = [self._samples[key] for key in keys]
        while any(self._missing[number] for number in numbers):
            self.poll(0.2)
        return self._rewards(numbers)

    def scored(self, keys: Sequence[Hashable]) -> bool:
        """Return whether the rewards of these samples are there; does not wait."""
        return not any(self._missing[self._samples[key]] for key in keys)

    def poll(self, wait: float = 0.0) -> int:
        """Read reports (wait up to ``wait`` seconds for one), stop calls that exceed their time limit, send new calls.

        Returns the number of missing rewards. The class docstring lists the reasons for GrpoError.
        """
        self._dispatch()
        readable = wait_readable([worker.reports for worker in self._workers], wait)
        self._last_poll = time.monotonic()
        for worker in list(self._workers):
            if worker.reports in readable:
                self._read(worker)
            elif not worker.ready and self._last_poll - worker.last_report > worker.kind.start_limit:
                self._replace(worker, "timeout", f"took longer than {worker.kind.start_limit:g} s")
            elif worker.calls and self._last_poll - worker.last_report > worker.kind.limit:
                flag = "--reward-model-timeout" if worker.kind.concurrent else "--reward-timeout"
                self._replace(worker, "timeout", f"took longer than {worker.kind.limit:g} s ({flag})")
        self._dispatch()
        return self._pending

    def _start(self, kind: _Kind) -> _Worker:
        worker = _Worker(start_supervised(kind.module), kind)
        with contextlib.suppress(BrokenPipeError):  # _read detects a dead process
            worker.tasks.write(pickle.dumps((kind.functions, *self._setup)))
            worker.tasks.flush()
        return worker

    def _dispatch(self) -> None:
        for worker in self._workers:
            kind, queue = worker.kind, worker.kind.queue
            if not queue or not worker.ready or (worker.calls and not kind.concurrent):
                continue
            # Chunks shrink towards the end, so that the workers finish together.
            size = len(queue) if kind.concurrent else min(_CHUNK, max(1, len(queue) // (2 * kind.count)))
            chunk = [queue.popleft() for _ in range(size)]
            if not worker.calls:
                worker.last_report = time.monotonic()
            try:
                worker.tasks.write(
                    pickle.dumps([(number, self._payload(number, todo), todo) for number, todo in chunk])
                )
                worker.tasks.flush()
            except BrokenPipeError:  # _read detects a dead process, and only its running call fails
                queue.extendleft(reversed(chunk))
            else:
                worker.calls |= {(number, function): None for number, functions in chunk for function in functions}

    def _payload(self, number: int, functions: Sequence[int]) -> Sample | list[Sample]:
        """Return the sample of a call, or the list of all samples of its group."""
        if functions[0] in self._group_wise:
            return [self._rows[member][1] for member in self._members[number]]
        return self._rows[number][1]

    def _read(self, worker: _Worker) -> None:
        data = os.read(worker.reports, 1 << 20)
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(1.0)
            self._replace(worker, "died", f"ended its process (exit status {worker.process.returncode})")
            return
        worker.last_report = time.monotonic()
        *lines, worker.unread = (worker.unread + data).split(b"\n")
        for line in lines if len(worker.unread) < _MAX_REPORT else [worker.unread]:
            match self._parsed(worker, line):
                case ["ready", [*group_wise]] if not worker.ready:
                    worker.ready, self._failed_starts = True, 0
                    self._group_wise.update(group_wise)
                case ["fatal", str(message)] if not worker.ready:
                    self.close()
                    raise GrpoError(message)
                case [int(number), int(function), str(kind), *content] if (number, function) in worker.calls:
                    del worker.calls[number, function]
                    self._report((number, function), kind, content)
                case _:
                    self._replace(worker, "failed", "wrote into a file descriptor that is not its own")
                    return

    def _parsed(self, worker: _Worker, line: bytes) -> Any:
        """Return the report in a line; None for a line that no worker writes, but a reward function can."""
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            return None
        match report:
            case [int(number), int(function), "value", value] if (number, function) in worker.calls:
                values = value if function in self._group_wise else [value]
                size = len(self._samples_of(number, function))
                is_list = isinstance(values, list) and len(values) == size
                return report if is_list and all(x is None or _is_number(x) for x in values) else None
            case [int(), int(), "failed" | "timeout", str(), *_] | [int(), int(), "fatal", str()]:
                return report
            case ["ready" | "fatal", _]:
                return report
        return None

    def _report(self, call: tuple[int, int], kind: str, content: list[Any]) -> None:
        progress.advance()
        number, function = call
        members = self._samples_of(number, function)
        if kind == "value":
            values = content[0] if function in self._group_wise else [content[0]]
            limited = [math.nan if value is None else max(-self._clip, min(value, self._clip)) for value in values]
            weight, largest = self._weights[function], _FLOAT32_MAX / 2 / len(self.names)
            if large := next((value for value in limited if abs(value * weight) > largest), None):
                reason = f"returned {large:g}, beyond float32's range in advantages (--reward-weights {weight:g})"
                self._report(call, "failed", [reason])
                return
            for member, value in zip(members, limited, strict=True):
                self._rows[member][2][function] = value
            self._succeeded[function] += 1
            self._failed_in_a_row[function] = 0
            self._close_call(members)
        elif kind == "fatal":
            self.close()
            key, sample, _ = self._rows[number]
            raise GrpoError(f'reward "{self.names[function]}" on {sample.source or f"sample {key}"}: {content[0]}')
        elif self._tries.get(call, 0) < self.retries:
            self._tries[call] = self._tries.get(call, 0) + 1
            next(kind for kind in self._kinds if function in kind.functions).queue.appendleft((number, (function,)))
        else:
            reason, *tail = content
            failed = self._failures_by_function[function]
            self._failed_in_a_row[function] += len(members)
            for key, sample, _ in (self._rows[member] for member in members):
                failed.append(Failure(self.names[function], key, sample.source, reason, sample.completion[:80], *tail))
            self._close_call(members)
            self._timeouts[function] += kind == "timeout"
            if self._timeouts[function] >= _MAX_TIMEOUTS and not self._succeeded[function]:
                self._stop(function, f"returned no value and timed out on {len(failed)} samples")

    def _close_call(self, members: Sequence[int]) -> None:
        self._pending -= len(members)
        for number in members:
            self._missing[number] -= 1

    def _stop(self, function: int, what: str) -> NoReturn:
        first = min(self._failures_by_function[function], key=lambda failure: self._samples.get(failure.key, -1))
        self.close()
        error = GrpoError(
            f'reward "{first.reward}" {what}; the first, {first.source or f"sample {first.key}"}: {first.reason}; '
            f"completion {first.completion!r}. Correct the function; it may return None for what it cannot "
            "score"
        )
        error.details = first.traceback
        raise error

    def _replace(self, worker: _Worker, kind: str, reason: str) -> None:
        """Replace a dead or stuck process.

        Its running call fails (all calls, for a process with concurrent calls); its other calls are queued again.
        """
        slot = self._workers.index(worker)
        end_supervised([worker])
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts == 3:
                self.close()
                raise GrpoError(f"a reward worker does not start: it {reason}; its output is above")
        self._workers[slot] = self._start(worker.kind)
        calls = list(worker.calls)
        blamed = len(calls) if worker.kind.concurrent else 1
        worker.kind.queue.extendleft((number, (function,)) for number, function in reversed(calls[blamed:]))
        for call in calls[:blamed]:
            self._report(call, kind, [reason])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
