"""A calculator for the policy: one tool, ``calculate``."""

import ast
import operator
from collections.abc import Callable

from megatron_grpo.environments.registry import register_tools
from megatron_grpo.environments.tools import ToolError

_OPERATIONS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LONGEST = 1000  # characters of an expression


def calculate(expression: str) -> str:
    """Calculate an arithmetic expression with + - * / // % and parentheses.

    Args:
        expression: The expression, such as "(12 + 3) * 4".
    """
    if not isinstance(expression, str) or len(expression) > _LONGEST:
        raise ToolError("the expression is not a text, or is too long")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression!r:.80} cannot be calculated: {error}") from error
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(operation, operand) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(operand))
    raise ValueError("it has more than numbers and + - * / // % ( )")


register_tools("calculator", [calculate], immediate=True)
