"""Common checks of flags; each raises GrpoError with the flag and its value."""

import difflib
import json
import math
import os
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import PATH, TEXT, Number

_PATH_BYTES, _NAME_BYTES = 4095, 255  # Linux: PATH_MAX without the final zero, NAME_MAX


def flag(dest: str) -> str:
    """Return the flag of an attribute of the parsed arguments."""
    return "--" + dest.replace("_", "-")


def check_value(name: str, kind: Any, value: Any) -> None:
    """Refuse a value that the kind of its flag excludes: a number out of range, an empty text, too long a path.

    Texts with bytes that are no UTF-8 are refused for all flags: neither the log nor records of the run can hold them.
    """
    (kind,) = kind if isinstance(kind, list) else (kind,)
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, float) and not math.isfinite(one):
            raise GrpoError(f"{name} is {one}: give a finite number")
        if isinstance(kind, Number) and isinstance(one, int | float) and not kind.contains(one):
            raise GrpoError(f"{name} ({one}) {kind}")
        if one == "" and kind != TEXT:
            raise GrpoError(f"{name} is empty: give a value, or leave the flag out")
        text = json.dumps(one, ensure_ascii=False) if isinstance(one, dict) else one
        if isinstance(text, str) and (shown := text.encode(errors="backslashreplace").decode()) != text:
            raise GrpoError(f"{name} {shown}: the value is not valid UTF-8: correct it, or rename the file")
        if kind == PATH and isinstance(one, str):
            longest = max(map(len, os.fsencode(one).split(b"/")))
            if len(os.fsencode(one)) > _PATH_BYTES or longest > _NAME_BYTES:
                raise GrpoError(
                    f"{name} {one[:40]}...: a path of {len(one)} characters, with a name of {longest}: the file system "
                    f"allows {_PATH_BYTES} and {_NAME_BYTES} bytes"
                )


def check_known(what: str, name: str, known: Iterable[str], cure: str) -> None:
    """Raise GrpoError if ``name`` is not one of the ``known`` names of ``what``, with all of them and a similar one."""
    names = sorted(known)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f' (did you mean "{close[0]}"?)' if close else ""
        raise GrpoError(f'{what} "{name}"{hint}; known: {", ".join(names) or "none"}. {cure}')


def positive(args: Namespace, dests: str) -> None:
    """Refuse zero and negative values of the attributes ``dests`` (separated by spaces); accept None."""
    for dest in dests.split():
        value = getattr(args, dest)
        if value is not None and value <= 0:
            raise GrpoError(f"{flag(dest)} ({value}) must be greater than 0")


def within(args: Namespace, dest: str, low: float, high: float) -> None:
    """Refuse a value outside [low, high]; accept None."""
    value = getattr(args, dest)
    if value is not None and not low <= value <= high:
        raise GrpoError(f"{flag(dest)} ({value}) must lie between {low:g} and {high:g}")


def was_given(args: Namespace, dest: str) -> bool:
    """Return whether a flag was given. A switch that a later flag has switched off was not: --x --no-x is neither."""
    return dest in args.explicit and getattr(args, dest) is not False


def required(args: Namespace, dest: str, cure: str) -> None:
    """Refuse a missing flag."""
    if getattr(args, dest) in (None, []):
        raise GrpoError(f"{flag(dest)} is missing: {cure}")


def needs(args: Namespace, dest: str, other: str, reason: str) -> None:
    """Refuse the flag of ``dest`` without the flag of ``other``, on which its effect depends.

    --eval-only takes the flags of a run, and needs no --save.
    """
    if other == "save" and args.eval_only:
        return
    if dest in args.explicit and getattr(args, dest) and not getattr(args, other):
        raise GrpoError(f"{flag(dest)} needs {flag(other)}: {reason}")


def excludes(args: Namespace, first: str, second: str, reason: str) -> None:
    """Refuse the combination of two flags."""
    if getattr(args, first) and getattr(args, second):
        raise GrpoError(f"{flag(first)} and {flag(second)} cannot both be given: {reason}")


def divides(args: Namespace, dest: str, size: int, what: str) -> None:
    """Refuse a value that is not a multiple of ``size``; ``what`` is the name of ``size`` in the message."""
    if getattr(args, dest) % size:
        raise GrpoError(f"{flag(dest)} ({getattr(args, dest)}) must be divisible by {what} ({size})")
