"""Probe of --tool-call-parser at the start: does it read a call that the model's own chat template writes?"""

import json
from collections.abc import Mapping
from typing import Any

from megatron_grpo.environments.rendering import Message, TurnRenderer
from megatron_grpo.environments.tool_calls import ToolCallParser
from megatron_grpo.utils.errors import GrpoError

# One argument of each type of JSON.
ARGUMENTS: dict[str, Any] = {
    "text": "one, two",
    "count": 5,
    "ratio": 2.5,
    "flag": True,
    "nothing": None,
    "items": [1, "two", None, False],
    "object": {"key": [1, 2.5], "other": None},
}
_TYPES: dict[str, Any] = {
    "text": "string",
    "count": "integer",
    "ratio": "number",
    "flag": "boolean",
    "nothing": ["integer", "null"],
    "items": "array",
    "object": "object",
}
NAME = "probe_types"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Take a value of each type.",
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": kind, "description": name} | ({"items": {}} if kind == "array" else {})
                for name, kind in _TYPES.items()
            },
            "required": list(_TYPES),
        },
    },
}
_QUESTION: list[Message] = [{"role": "user", "content": "Take them."}]


def rendered_call(
    renderer: TurnRenderer, variables: Mapping[str, Any], arguments: Mapping[str, Any] = ARGUMENTS, calls: int = 1
) -> tuple[str, str, str] | None:
    """Return (the prompt, a turn with calls of `TOOL`, the end of the turn) as the chat template writes them.

    None if the template writes no calls.
    """
    function = {"name": NAME, "arguments": dict(arguments)}
    made = [{"id": f"call{number:05d}", "type": "function", "function": function} for number in range(calls)]
    turn = {"role": "assistant", "content": "", "tool_calls": made}
    answers = [{"role": "tool", "name": NAME, "tool_call_id": call["id"], "content": "done"} for call in made]
    try:
        prompt = renderer.text(_QUESTION, [TOOL], variables)
        whole = renderer.text([*_QUESTION, turn, *answers], [TOOL], variables)
    except GrpoError:  # the template has no tools
        return None
    begin = next((i for i, (a, b) in enumerate(zip(prompt, whole)) if a != b), min(len(prompt), len(whole)))
    called = whole.find(NAME, begin)
    ends = [(place, end) for end in renderer.ends if called >= 0 and (place := whole.find(end, called)) >= 0]
    if not ends:
        return None
    place, end = min(ends)
    return whole[:begin], whole[begin:place], end


def probe(
    parser: ToolCallParser, renderer: TurnRenderer, tokenizer: Any, variables: Mapping[str, Any] | None = None
) -> None:
    """Raise GrpoError if the parser reads a call otherwise than the chat template wrote it.

    ``tokenizer`` is that of transformers. Parsers of --external-plugins, and templates without calls, are not probed.
    """
    rendered = rendered_call(renderer, variables or {}) if parser.is_vllms else None
    if rendered is None:
        return
    before, text, end = rendered
    text = parser.after_reasoning(text, variables)
    ids = tokenizer.encode(text + end, add_special_tokens=False)
    said = parser.parse(text, [TOOL], ids=ids, before=before, variables=variables)
    read = [(call.name, call.arguments) for call in said.calls]
    if _as_json(read) == _as_json([(NAME, ARGUMENTS)]) and not said.malformed:
        return
    found: list[Any] = [*read] or [call.error for call in said.malformed]
    where = " in reasoning (--reasoning-parser)" if not found and NAME in said.reasoning else ""
    raise GrpoError(
        f"--tool-call-parser {parser.name} does not read the calls that the model's chat template writes. It finds "
        f"{_as_json(found) if found else f'no call{where}'} in {text!r}, which calls {NAME} with "
        f"{_as_json(ARGUMENTS)}: give the parser of the model's family, or with --tool-role user a prompt "
        "that asks for this parser's format"
    )


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
