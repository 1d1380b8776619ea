"""Scoring process of ``pool.RewardPool``: tasks arrive on stdin as pickles, reports leave on stdout as JSON lines.

The first task is ({function number: name}, plugins, flags, sys.path); the report is ["ready", numbers of the group-wise
functions]. All later tasks are lists of (sample number, sample, function numbers), with a list of samples in place of
the sample for group-wise functions. Each call is reported when it is done: [sample number, function number, ...] with
"value", x (group-wise: a list), or "failed", reason, traceback, or "fatal", message. The process ends with stdin.
"""

import asyncio
import inspect
import json
import math
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from megatron_grpo.rewards.adapters import register_adapters
from megatron_grpo.rewards.registry import RewardFunction, Sample, get_rewards, is_group_wise, load_plugins
from megatron_grpo.utils.errors import GrpoError, raised_at
from megatron_grpo.utils.process_tree import supervise

_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
Report = Callable[[list[Any]], None]


def main() -> None:
    tasks, report = begin()
    names, plugins, flags, sys.path[:] = pickle.load(tasks)
    try:
        load_plugins(plugins)
        register_adapters(flags.get("reward_adapter"))
        functions = dict(zip(names, get_rewards(list(names.values()), flags), strict=True))
    except GrpoError as error:
        report(["fatal", str(error)])
        return
    report(["ready", [number for number, name in names.items() if is_group_wise(name)]])
    while True:
        try:
            chunk = pickle.load(tasks)
        except EOFError:
            return
        for number, sample, todo in chunk:
            for function in todo:
                report([number, function, *_call_report(functions[function], sample)])


def begin() -> tuple[BinaryIO, Report]:
    """Return the stream of tasks and the function that sends a report.

    It returns in a child of this process, which ends with its parent, and with it all that reward functions have
    started.
    """
    supervise()
    tasks, reports = _detach_streams()
    process = os.getpid()

    def report(line: list[Any]) -> None:
        if os.getpid() != process:  # a child that a reward function forked must not report
            os._exit(0)
        reports.write(json.dumps(line).encode() + b"\n")
        reports.flush()

    return tasks, report


def _detach_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return stdin and stdout, and hide both from reward functions: they print to stderr and read an empty stdin."""
    tasks, reports = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return tasks, reports


def _call_report(function: RewardFunction, sample: Sample | list[Sample]) -> list[Any]:
    try:
        value = function(sample)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return group_report(value, len(sample)) if isinstance(sample, list) else value_report(value)
    # BaseException includes SystemExit and the time-outs of some libraries.
    except BaseException as error:
        return failure(error)


def value_report(value: Any) -> list[Any]:
    """Return the report of a call that returned ``value`` for one completion."""
    try:
        return ["value", as_reward(value)]
    except ValueError as fault:
        return ["failed", f"returned {fault}", ""]


def as_reward(value: Any) -> float | None:
    """Return a reward as a number that float32 holds; ValueError for what is neither such a number nor None."""
    if value is None:
        return None
    number = _number(value)
    if abs(number) <= _FLOAT32_MAX:
        return number
    fault = f"beyond float32's range (±{_FLOAT32_MAX:.2g})" if math.isfinite(number) else "not a finite number"
    raise ValueError(f"{value!r:.80}, {fault}")


def group_report(values: Any, size: int) -> list[Any]:
    """Return the report of a call that returned ``values`` for a group of ``size`` completions."""
    if not isinstance(values, list | tuple) and not hasattr(values, "__array__"):
        return ["failed", f"returned {values!r:.80}, not a list of {size} values, one for each completion", ""]
    reports = [value_report(value) for value in values]
    if len(reports) != size:
        return ["failed", f"returned {len(reports)} values for {size} completions", ""]
    for number, (kind, content, *_) in enumerate(reports, start=1):
        if kind == "failed":
            return ["failed", f"{content} (value {number} of {size})", ""]
    return ["value", [content for _, content in reports]]


def failure(error: BaseException) -> list[Any]:
    """Return the report of a call that raised ``error``."""
    if isinstance(error, GrpoError):
        return ["fatal", _printable(str(error)[:2000])]
    frames = error.__traceback__ and error.__traceback__.tb_next
    tail = "".join(traceback.format_exception(type(error), error, frames))[-1500:]
    reason = f"raised {type(error).__name__}: {error}"[:300] + raised_at(error)
    return ["failed", _printable(reason), _printable(tail)]


def _printable(text: str) -> str:
    r"""Return the text with lone surrogates (from json.loads("\ud800"), say) as escapes: streams cannot encode them."""
    return text.encode(errors="backslashreplace").decode()


def _number(value: Any) -> float:
    """Return any number as a float (numpy and torch scalars, too), else NaN."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except OverflowError:  # an int beyond float64's range
        return sys.float_info.max
    except (TypeError, ValueError):
        return math.nan


if __name__ == "__main__":
    main()
