"""Reward for the Countdown numbers game: reach a target from given numbers."""

import ast
import operator
from collections import Counter
from fractions import Fraction

from megatron_grpo.rewards.builtin.answer_text import final_answer
from megatron_grpo.rewards.registry import Sample, register_reward
from megatron_grpo.utils.errors import GrpoError

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_UNICODE_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-"})


@register_reward("countdown")
def countdown(sample: Sample) -> float:
    r"""Return 1 if the answer is an arithmetic expression of row["nums"] with the value row["target"], else 0.

    The answer is the <answer> text or the last \boxed{}, up to "=". The expression uses each number exactly once, with
    + - * / and brackets, and is evaluated exactly.

    Source of the game's form: TinyZero (Pan et al. 2025, github.com/Jiayi-Pan/TinyZero).
    """
    numbers, target = sample.row.get("nums"), sample.row.get("target")
    if not _are_integers([target]) or not isinstance(numbers, list) or not numbers or not _are_integers(numbers):
        raise GrpoError(
            f'the row needs "nums" (a list of integers) and "target" (an integer), found {numbers!r:.80} and '
            f"{target!r:.80}"
        )
    answer = final_answer(sample.completion)
    if answer is None:
        return 0.0
    used: list[int] = []
    try:
        tree = ast.parse(answer.partition("=")[0].translate(_UNICODE_SIGNS).strip(), mode="eval")
        value = _value(tree.body, used)
    # The text is not an expression, or is nested too deeply for Python's parser.
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(value == target and Counter(used) == Counter(numbers))


def _are_integers(values: list) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Return the value of an expression and append its numbers to ``used``; ValueError for other syntax."""
    match node:
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_value(left, used), _value(right, used))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, used)
        case ast.Constant(int(number)) if not isinstance(number, bool):
            used.append(number)
            return Fraction(number)
    raise ValueError(f"not arithmetic: {ast.dump(node):.80}")
