"""Reward for the Countdown numbers game: reach a target from given numbers."""

import ast
import operator
import re
from collections import Counter
from fractions import Fraction

from megatron_grpo.rewards.builtin.answer_text import final_answer
from megatron_grpo.rewards.registry import Sample, register_reward
from megatron_grpo.utils.errors import GrpoError

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_UNICODE_SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\$|`|\\[()\[\]]|\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])|\\[,;:! ]|\\q?quad(?![A-Za-z])", " "),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
    )
]
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


@register_reward("countdown")
def countdown(sample: Sample, *, answer_extraction: str = "boxed", unfinished_thinking: str = "wrong") -> float:
    r"""Return 1 if the answer is an arithmetic expression of row["nums"] with the value row["target"], else 0.

    The answer is that of `final_answer`, up to "=", in plain text or LaTeX. The expression uses each number exactly
    once, with + - * / and brackets, and is evaluated exactly.

    Source of the game's form: TinyZero (Pan et al. 2025, github.com/Jiayi-Pan/TinyZero).
    """
    numbers, target = sample.row.get("nums"), sample.row.get("target")
    if not _are_integers([target]) or not isinstance(numbers, list) or not numbers or not _are_integers(numbers):
        raise GrpoError(
            f'the row needs "nums" (a list of integers) and "target" (an integer), found {numbers!r:.80} and '
            f"{target!r:.80}"
        )
    answer = final_answer(sample, answer_extraction, unfinished_thinking)
    if answer is None:
        return 0.0
    used: list[int] = []
    try:
        tree = ast.parse(_plain(answer.partition("=")[0]), mode="eval")
        value = _value(tree.body, used)
    # The text is not an expression, or is nested too deeply for Python's parser.
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(value == target and Counter(used) == Counter(numbers))


def _plain(expression: str) -> str:
    r"""Return an expression with LaTeX's and Unicode's signs in Python's: \times, \div, \frac{}{}, brackets."""
    for pattern, replacement in _LATEX:
        expression = pattern.sub(replacement, expression)
    before = None
    while before != expression:
        before, expression = expression, _FRACTION.sub(r"((\1)/(\2))", expression)
    return expression.replace("{", "(").replace("}", ")").translate(_UNICODE_SIGNS).strip()


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
