"""What a row of the data says of its prompt: text or chat messages, tools, and how often it was solved."""

from collections.abc import Mapping
from typing import Any

from megatron_grpo.data.json_column import json_column
from megatron_grpo.data.row_files import kind
from megatron_grpo.utils.errors import GrpoError

ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_prompt(row: dict[str, Any], key: str, system: str | None = None) -> str | list[dict[str, Any]]:
    """The row's prompt, from column ``key`` or else ``messages``: a string as it stands, or chat messages.

    With a system prompt, a string becomes the user's message after it. Raises GrpoError saying what was expected.
    """
    column = key if row.get(key) is not None else "messages"
    prompt = row.get(column)
    if prompt is None:
        found = ", ".join(f"{name} (null)" if value is None else name for name, value in row.items()) or "no column"
        raise GrpoError(f'no prompt: expected a column "{key}" (--prompt-key) or "messages", found {found}')
    if isinstance(prompt, str):
        _check_text(f'"{column}"', prompt)
        return (
            prompt if system is None else [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        )
    if not isinstance(prompt, list):
        raise GrpoError(f'"{column}" must be a string or a list of messages, found {kind(prompt)}')
    if not prompt:
        raise GrpoError(f'"{column}" is an empty list of messages')
    messages = [_check_message(f'message {number} of "{column}"', message) for number, message in enumerate(prompt, 1)]
    if messages[-1]["role"] == "assistant":
        raise GrpoError(f'"{column}" ends with an assistant message; that one is to be generated, so leave it out')
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise GrpoError(f'"{column}" has a system message of its own; leave out either that or --system-prompt')
    return [{"role": "system", "content": system}, *messages]


def _check_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise GrpoError(f'{name} must be an object with "role" and "content", found {kind(message)}')
    message = _without_nulls(message)
    if "role" not in message:
        raise GrpoError(f'{name} has no "role"')
    _check_text(f'"role" of {name}', message["role"])
    if message["role"] not in ROLES:
        raise GrpoError(f'"role" of {name} is {message["role"]!r}: expected one of {", ".join(ROLES)}')
    if message["role"] == "assistant" and message.get("tool_calls") and not message.get("content"):
        return message | {"content": ""}  # it did nothing but call
    if "content" not in message:
        raise GrpoError(f'{name} has no "content"')
    _check_text(f'"content" of {name}', message["content"])
    return message


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise GrpoError(f"{name} must be a string, found {kind(text)}")
    if not text.strip():
        raise GrpoError(f"{name} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrpoError(f"{name} is not valid Unicode: {error}") from error


def parse_tools(row: Mapping[str, Any], prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The row's ``tools`` for the chat template: a list of objects, or JSON text of one, as Parquet needs it where
    they differ in shape; None without. GrpoError saying what was expected.
    """
    column = row.get("tools")
    tools = json_column(column)
    if column is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and tool for tool in tools):
        raise GrpoError(f'"tools" must be a list of objects, or JSON text of one, found {column!r:.200}')
    if isinstance(prompt, str):
        raise GrpoError('"tools" needs a prompt of chat messages: a chat template tells the model of them')
    return tools if isinstance(column, str) else _without_nulls(tools)


def pass_rate(row: Mapping[str, Any]) -> float:
    """How often some policy solved the row, 0 to 1; GrpoError without it."""
    rate = row.get("pass_rate")
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate <= 1:
        raise GrpoError(
            f'"pass_rate" is {rate!r}: --curriculum, --min-pass-rate and --max-pass-rate need a number from 0 to 1 in '
            "every row"
        )
    return float(rate)


def _without_nulls(value: Any) -> Any:
    """Parquet gives every object the keys of all of them, and templates ask whether a key is there."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
