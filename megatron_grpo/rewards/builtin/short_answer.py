"""Rewards for answers that are compared as text or as one number."""

import re
from decimal import Decimal

from megatron_grpo.data.answer_column import ANSWER_COLUMNS, find_answers
from megatron_grpo.rewards.builtin.answer_text import after_reasoning
from megatron_grpo.rewards.registry import Sample, register_reward
from megatron_grpo.utils.errors import GrpoError

# A minus after a digit, letter or bracket is an operator; a comma counts only before exactly three digits.
_NUMBER = re.compile(
    r"(?P<sign>(?:(?<![\w)\]])[-−])?)\$?\s?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
)
# Separators of thousands in LaTeX: 70{,}000, 70,\!000, 70\,000.
_LATEX_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\!,?|\\,)\s*(?=[0-9]{3}(?![0-9]))")


def gold_text(sample: Sample) -> str:
    """Return the row's answer, from the first of `ANSWER_COLUMNS` that the row has, as text.

    A list of one value, which verl's documentation shows, counts as this value. GrpoError if the row has none of the
    columns, or if the value is neither a non-empty string nor a number.
    """
    for name, gold in find_answers(sample.row).items():
        if isinstance(gold, list) and len(gold) == 1:
            gold = gold[0]
        if isinstance(gold, list) and len(gold) > 1:
            raise GrpoError(
                f'the row\'s answer, in "{name}", has several values, {gold!r:.200}: give one, or compare with all of '
                "them in a reward of your own (docs/rewards.md)"
            )
        if isinstance(gold, bool) or not isinstance(gold, str | int | float) or not str(gold).strip():
            raise GrpoError(
                f'the row\'s answer, in "{name}", must be a non-empty string or a number, found {gold!r:.200}: correct '
                "it, or write the answer to an earlier column of docs/data.md, such as answer"
            )
        # A column of whole numbers with nulls is one of floats in Parquet: 72.0 is 72. 1e-05 would be read as e - 5.
        if isinstance(gold, float):
            gold = int(gold) if gold.is_integer() else format(Decimal(repr(gold)), "f")
        return str(gold).strip()
    found = [f"{name} without a value" if name in ANSWER_COLUMNS else name for name in sample.row]
    raise GrpoError(
        f"the row has no answer to compare with: expected {', '.join(ANSWER_COLUMNS[:-1])} or {ANSWER_COLUMNS[-1]}, "
        f"found {', '.join(found) or 'no column'}"
    )


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None; thousands separators, $ and a final full stop are removed."""
    matches = list(_NUMBER.finditer(_LATEX_THOUSANDS.sub(",", text)))
    if not matches:
        return None
    value = Decimal(matches[-1]["digits"].replace(",", ""))
    return -value if matches[-1]["sign"] else value


@register_reward("exact_match")
def exact_match(sample: Sample, *, unfinished_thinking: str = "wrong") -> float:
    """Return 1 if the completion after its reasoning equals the row's answer without white space at both ends, else 0.

    `after_reasoning` says where the reasoning ends.
    """
    gold, said = gold_text(sample), after_reasoning(sample, unfinished_thinking)
    return float(said is not None and said.strip() == gold)


@register_reward("gsm8k")
def gsm8k(sample: Sample, *, unfinished_thinking: str = "wrong") -> float:
    """Return 1 if the completion's last number equals that of the row's answer (after "####", if present), else 0.

    The number is looked for after the reasoning (`after_reasoning`).
    """
    answer = gold_text(sample).rpartition("####")[2]
    gold = last_number(answer)
    if gold is None:
        raise GrpoError(f"no number in the row's answer: {answer!r}")
    said = after_reasoning(sample, unfinished_thinking)
    return float(said is not None and last_number(said) == gold)
