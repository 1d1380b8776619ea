"""Reward for correct tool calls: names and arguments."""

import json
import re
from collections import Counter
from typing import Any

from megatron_grpo.data.json_column import json_column
from megatron_grpo.rewards.builtin.answer_text import after_reasoning
from megatron_grpo.rewards.registry import Sample, register_reward
from megatron_grpo.utils.errors import GrpoError

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# A call comes first, because its arguments can hold the tags of reasoning.
_CALL_OR_REASONING = re.compile(r"(<tool_call>.*?</tool_call>)|<think>.*?(?:</think>|\Z)", re.DOTALL)


@register_reward("tool_call")
def tool_call(sample: Sample, *, unfinished_thinking: str = "wrong") -> float:
    """Return the agreement of the completion's tool calls with row["tool_calls"], from 0 to 1.

    (names in common + calls in common) / (2 max(calls, expected calls)), as multisets, in any order. Two calls are
    equal if their names and all arguments are equal. If no call is expected, the reward is 1 without a call, else 0.

    A call of the completion is <tool_call>{"name": .., "arguments": {..}}</tool_call>; other text in the tags counts as
    a call without a match. What is written in reasoning (<think> .. </think>) is no call. row["tool_calls"] is a list,
    or JSON text of a list: Parquet needs JSON text if the arguments differ between rows.

    Source of the two parts, names and arguments: ToolRL (Qian et al. 2025, arXiv:2504.13958), simplified.
    """
    expected = _expected_calls(sample.row.get("tool_calls"))
    said = after_reasoning(sample, unfinished_thinking)
    if said is None:
        return 0.0
    if "</think>" in sample.completion:  # of an episode with several turns the calls of all turns
        said = _without_reasoning(sample.completion)
    made = [_parse_call(text) for text in _CALL.findall(said)]
    if not expected:
        return float(not made)
    calls = Counter(call for call in made if call) & Counter(expected)
    names = Counter(call[0] for call in made if call) & Counter(name for name, _ in expected)
    return (names.total() + calls.total()) / (2 * max(len(made), len(expected)))


def _without_reasoning(completion: str) -> str:
    """Return the completion without reasoning; without an end, reasoning is the rest."""
    begin, end = completion.find("<think>"), completion.find("</think>")
    if end >= 0 and not 0 <= begin < end:  # the prompt ends with <think>
        completion = completion[end + len("</think>") :]
    return _CALL_OR_REASONING.sub(lambda match: match[1] or "", completion)


def _expected_calls(column: Any) -> list[tuple[str, str]]:
    calls = json_column(column)
    if isinstance(calls, list):
        read = [_parse_call(json.dumps(call)) for call in calls]
        if all(read):
            return [call for call in read if call]
    raise GrpoError(
        f'the row\'s "tool_calls" must be a list of {{"name": .., "arguments": {{..}}}}, found {column!r:.200}'
    )


def _parse_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a call, or None; arguments are JSON with sorted keys, with 2 for 2.0."""
    try:
        call = json.loads(text, parse_float=_parse_number)
    except (ValueError, RecursionError):
        return None
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            return name, json.dumps(arguments, sort_keys=True)
    return None


def _parse_number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value
