"""The column of a data row that has the reference answer, in the rows of this project, verl, ms-swift and TRL."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron_grpo.data.json_column import json_column

LAST_TURN = "the last assistant message of messages"
# The first of these that a row has is its answer. "a.b" is the key b of the object (or its JSON text) in column a.
ANSWER_COLUMNS = ("answer", "reward_model.ground_truth", "solution", "ground_truth", LAST_TURN)


def find_answers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `ANSWER_COLUMNS` that are neither null nor NaN, in their order; the first is the answer."""
    found = {name: _value(row, name) for name in ANSWER_COLUMNS}
    return {name: value for name, value in found.items() if not (value is None or value != value)}


def _value(row: Mapping[str, Any], name: str) -> Any:
    if name == LAST_TURN:
        messages = json_column(row.get("messages"))
        last = messages[-1] if isinstance(messages, list) and messages else None
        return last.get("content") if isinstance(last, dict) and last.get("role") == "assistant" else None
    column, dot, key = name.partition(".")
    if not dot:
        return row.get(column)
    value = json_column(row.get(column))
    return value.get(key) if isinstance(value, dict) else None


class AnswerCounts:
    """Counts of the columns that rows have their answers in, for one line at the start of a run."""

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()
        self._unused: Counter[str] = Counter()
        self._none = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row."""
        used, *unused = find_answers(row) or [None]
        self._unused.update(name for name in unused if name is not None)
        if used is None:
            self._none += 1
        else:
            self._used[used] += 1

    def line(self) -> str | None:
        """Return a line such as "answers from reward_model.ground_truth"; None if no row has an answer."""
        if not self._used:
            return None
        if len(self._used) == 1 and not self._none:
            text = f"answers from {next(iter(self._used))}"
        else:
            text = "answers from " + ", ".join(f"{name} ({count:,} rows)" for name, count in self._used.items())
        text += f"; {self._none:,} rows have none" if self._none else ""
        unused = ", ".join(f"{name} ({count:,} rows)" for name, count in self._unused.items())
        return text + (f"; not used, because an earlier column has the answer: {unused}" if unused else "")
