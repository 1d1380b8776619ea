"""Parsed arguments: an object that nothing changes, the steps that resolve it, and its text."""

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn

# Never printed, saved or logged.
SECRET = ("vllm_server_api_key", "sglang_server_api_key")

# A `resolve_*` function returns values that follow from the arguments; a `check_*` raises GrpoError or returns None.
Step = Callable[[Any], Mapping[str, Any] | None]


class Arguments(Namespace):
    """Arguments that cannot be changed: an assignment raises AttributeError. `replaced` returns a changed copy."""

    def __init__(self, **values: Any):
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"args.{name} cannot be set: arguments do not change; take replaced(args, {name}=...)")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"args.{name} cannot be deleted: arguments do not change")


def replaced[A: Namespace](args: A, **values: Any) -> A:
    """Return a copy of the arguments with these values."""
    return type(args)(**vars(args) | values)


def kept_for_newest[T](make: Callable[[Namespace], T]) -> Callable[[Namespace], T]:
    """Return the function with its result kept for the newest `Arguments`; other arguments may change."""
    newest: tuple[Arguments, T] | None = None

    @wraps(make)
    def kept(args: Namespace) -> T:
        nonlocal newest
        if not isinstance(args, Arguments):
            return make(args)
        if newest is None or newest[0] is not args:
            newest = args, make(args)
        return newest[1]

    return kept


def resolved[A: Namespace](args: A, *steps: Step) -> A:
    """Return the arguments with the values that follow from them: those that each step returns, one after the other."""
    for step in steps:
        args = replaced(args, **(step(args) or {}))
    return args


def hyphens(word: str) -> str:
    """Return a word of the command line with hyphens for the underscores of a flag's name (not of its value)."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def args_to_json(args: Namespace) -> dict[str, Any]:
    """Return the arguments as JSON's types, for a checkpoint; ``explicit`` and the API keys are omitted."""
    omitted = ("explicit", *SECRET)
    return json.loads(json.dumps({dest: value for dest, value in vars(args).items() if dest not in omitted}))
