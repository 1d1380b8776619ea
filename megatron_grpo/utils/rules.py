"""The forms that rules about flags have: each refuses with a message that holds the numbers."""

from argparse import Namespace

from megatron_grpo.utils.errors import GrpoError


def flag(dest: str) -> str:
    """The flag of an attribute of the parsed arguments."""
    return "--" + dest.replace("_", "-")


def positive(args: Namespace, dests: str) -> None:
    """Refuse zero and negative values of these attributes; None is fine."""
    for dest in dests.split():
        value = getattr(args, dest)
        if value is not None and value <= 0:
            raise GrpoError(f"{flag(dest)} ({value}) must be greater than 0")


def within(args: Namespace, dest: str, low: float, high: float) -> None:
    """Refuse a value outside [low, high]; None is fine."""
    value = getattr(args, dest)
    if value is not None and not low <= value <= high:
        raise GrpoError(f"{flag(dest)} ({value}) must lie between {low:g} and {high:g}")


def required(args: Namespace, dest: str, cure: str) -> None:
    """Refuse a flag that was not given, unless nothing will be run."""
    if getattr(args, dest) in (None, []) and not args.dry_run:
        raise GrpoError(f"{flag(dest)} is missing: {cure}")


def needs(args: Namespace, dest: str, other: str, reason: str) -> None:
    """Refuse a flag that was given without the one on which its effect depends."""
    if dest in args.explicit and getattr(args, dest) and not getattr(args, other):
        raise GrpoError(f"{flag(dest)} needs {flag(other)}: {reason}")


def excludes(args: Namespace, first: str, second: str, reason: str) -> None:
    """Refuse two flags together."""
    if getattr(args, first) and getattr(args, second):
        raise GrpoError(f"{flag(first)} and {flag(second)} cannot both be given: {reason}")


def divides(args: Namespace, dest: str, size: int, what: str) -> None:
    """Refuse a value that ``size``, which is called ``what``, does not divide."""
    if getattr(args, dest) % size:
        raise GrpoError(f"{flag(dest)} ({getattr(args, dest)}) must be divisible by {what} ({size})")
