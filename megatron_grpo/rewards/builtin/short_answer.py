"""Rewards for answers that are compared as text or as one number."""

import re
from decimal import Decimal

from megatron_grpo.rewards.registry import Sample, register_reward
from megatron_grpo.utils.errors import GrpoError

# A minus after a digit, letter or bracket is an operator; a comma counts only before exactly three digits.
_NUMBER = re.compile(
    r"(?P<sign>(?:(?<![\w)\]])[-−])?)\$?\s?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)


def gold_text(sample: Sample, *columns: str) -> str:
    """Return the first of these columns that the row has, as text.

    GrpoError if the row has none of them, or if the value is neither a non-empty string nor a number.
    """
    for column in columns:
        gold = sample.row.get(column)
        if gold is None:
            continue
        if isinstance(gold, bool) or not isinstance(gold, str | int | float) or not str(gold).strip():
            raise GrpoError(f'the row\'s "{column}" must be a non-empty string or a number, found {gold!r}')
        return str(gold).strip()
    raise GrpoError(
        f'the row has no "{" or ".join(columns)}" to compare with, only {", ".join(sample.row) or "nothing"}'
    )


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None; thousands separators, $ and a final full stop are removed."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    value = Decimal(matches[-1]["digits"].replace(",", ""))
    return -value if matches[-1]["sign"] else value


@register_reward("exact_match")
def exact_match(sample: Sample) -> float:
    """Return 1 if the completion equals row["answer"] after removal of white space at both ends, else 0."""
    return float(sample.completion.strip() == gold_text(sample, "answer"))


@register_reward("gsm8k")
def gsm8k(sample: Sample) -> float:
    """Return 1 if the completion's last number equals that of row["answer"] (after "####", if present), else 0."""
    answer = gold_text(sample, "answer").rpartition("####")[2]
    gold = last_number(answer)
    if gold is None:
        raise GrpoError(f'no number in the row\'s "answer": {answer!r}')
    return float(last_number(sample.completion) == gold)
