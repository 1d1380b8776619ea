"""Functions that read the value of a flag from its text; argparse shows their names in its errors."""

import argparse
import ast
import json
from typing import Any

_MOST_ENTRIES = 10**4  # of a list expression: more layers than a model has


def integer_or_auto(text: str) -> int | str:
    """Parse ``4`` or ``auto``."""
    return text if text == "auto" else int(text)


METAVARS: dict[Any, str] = {int: "N", float: "X", str: "S", integer_or_auto: "N|auto"}


def integers(text: str) -> list[int]:
    """Parse ``128,0`` or ``(128,0)``."""
    return [int(part) for part in text.strip("()[]").split(",")]


def integer_or_pattern(text: str) -> int | list[int]:
    """Parse ``4``, ``[1,0,0]`` or, as in Megatron-LM, a list expression such as ``([1]*3+[0])*2``."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
                return -number
            case ast.List(elts=items):
                return [value(item) for item in items]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                factors = [value(left), value(right)]
                sizes = [len(factor) if isinstance(factor, list) else factor for factor in factors]
                if sizes[0] * sizes[1] <= _MOST_ENTRIES or not any(isinstance(factor, list) for factor in factors):
                    return factors[0] * factors[1]
        raise ValueError(f"not an integer or a list expression: {text}")

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an integer or a list expression: {text}") from error


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object such as ``{"rope_type": "linear", "factor": 8.0}``; ArgumentTypeError for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not a JSON object, such as '{{\"name\": 1}}' in quotes")
    return value
