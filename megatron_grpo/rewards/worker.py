"""A scoring process of ``pool.RewardPool``: samples come in on stdin as pickles, reports leave on stdout as JSON lines.

First comes ({function number: name}, plugins, flags, sys.path), answered by ["ready"]; then lists of (sample number,
sample, numbers of functions), with a report for each call as soon as it is done: [sample number, function number, ...]
with "value", x, or "failed", reason, traceback, or "fatal", message.
The process ends when stdin does.
"""

import asyncio
import ctypes
import inspect
import json
import math
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from megatron_grpo.rewards.registry import RewardFunction, Sample, get_rewards, load_plugins
from megatron_grpo.utils.errors import GrpoError

_FLOAT32_MAX = 3.4028234e38
Report = Callable[[list[Any]], None]


def main() -> None:
    tasks, report = begin()
    names, plugins, flags, sys.path[:] = pickle.load(tasks)
    try:
        load_plugins(plugins)
        functions = dict(zip(names, get_rewards(list(names.values()), flags), strict=True))
    except GrpoError as error:
        report(["fatal", str(error)])
        return
    report(["ready"])
    while True:
        try:
            chunk = pickle.load(tasks)
        except EOFError:
            return
        for number, sample, todo in chunk:
            for function in todo:
                report([number, function, *_call(functions[function], sample)])


def begin() -> tuple[BinaryIO, Report]:
    """Where tasks come from, and what sends a report; this process ends with its parent."""
    tasks, reports = _take_streams()
    process = os.getpid()

    def report(line: list[Any]) -> None:
        if os.getpid() != process:  # a function has forked, and its child came back
            os._exit(0)
        reports.write(json.dumps(line).encode() + b"\n")
        reports.flush()

    if sys.platform == "linux":
        # A function that hangs never comes back to see stdin end: PR_SET_PDEATHSIG ends it when the parent is killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    return tasks, report


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout for ourselves: what reward functions print goes to stderr, and they find nothing to read."""
    tasks, reports = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return tasks, reports


def _call(function: RewardFunction, sample: Sample) -> list[Any]:
    try:
        value = function(sample)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return value_report(value)
    # Also what is no Exception: SystemExit, and time-outs that some libraries raise.
    except BaseException as error:
        return failure(error)


def value_report(value: Any) -> list[Any]:
    """What is told of a call that returned this."""
    if value is None:
        return ["value", None]
    number = _finite(value)
    return ["value", number] if number is not None else ["failed", f"returned {value!r:.80}, no finite number", ""]


def failure(error: BaseException) -> list[Any]:
    """What is told of a call that raised this."""
    if isinstance(error, GrpoError):
        return ["fatal", _printable(str(error)[:2000])]
    frames = error.__traceback__ and error.__traceback__.tb_next
    tail = "".join(traceback.format_exception(type(error), error, frames))[-1500:]
    return ["failed", _printable(f"raised {type(error).__name__}: {error}"[:300]), _printable(tail)]


def _printable(text: str) -> str:
    r"""The text with half a surrogate pair, which json.loads makes of "\ud800" and no stream takes, as an escape."""
    return text.encode(errors="backslashreplace").decode()


def _finite(value: Any) -> float | None:
    """Any kind of number that float32 can hold, or None; also what numpy and torch call a scalar."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= _FLOAT32_MAX else None


if __name__ == "__main__":
    main()
