"""Parsing of a data row: the prompt (text or chat messages), the tools and the pass rate."""

from collections.abc import Collection, Mapping
from typing import Any

from megatron_grpo.data.json_column import json_column, kind
from megatron_grpo.utils.errors import GrpoError

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_prompt(
    row: dict[str, Any], key: str, system: str | None = None, media: Collection[str] = ()
) -> str | list[dict[str, Any]]:
    """Return the prompt of column ``key``, or of column ``messages`` if it is absent: a string or chat messages.

    A string that is JSON text of messages counts as these. ``media``: "image", "video"; with any of them the content of
    a message can be a list of parts, text and these.
    A last assistant message of ``messages`` is the reference answer (answer_column.py) and no part of the prompt.
    With a system prompt, a string becomes the user's message after it. Raises GrpoError with the expected format.
    """
    column, messages = _parse_column(row, key, media)
    if isinstance(messages, str):
        if system is None:
            return messages
        return [{"role": "system", "content": system}, {"role": "user", "content": messages}]
    if column == "messages" and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise GrpoError(f'"{column}" has only an assistant message: the prompt is missing before it')
    if messages[-1]["role"] == "assistant":
        raise GrpoError(
            f'"{column}" ends with an assistant message, but the model generates that message: leave it out, or name '
            'the column "messages" if that message is the reference answer'
        )
    return _after_system(messages, column, system)


def parse_conversation(
    row: dict[str, Any], key: str, system: str | None = None, media: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the messages of column ``messages`` up to the last one of the assistant; arguments as of `parse_prompt`.

    Raises GrpoError if there is none, or nothing before the first one.
    """
    _, messages = _parse_column({"messages": row.get("messages")}, key, media)
    if isinstance(messages, str):
        raise GrpoError('"messages" must be a list of messages, found a string')
    spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not spoken:
        raise GrpoError('"messages" has no message of the assistant, and these are what is learnt')
    if spoken[0] == 0:
        raise GrpoError('"messages" begins with an assistant message: the prompt is missing before it')
    return _after_system(messages[: spoken[-1] + 1], "messages", system)


def _parse_column(row: Mapping[str, Any], key: str, media: Collection[str]) -> tuple[str, str | list[dict[str, Any]]]:
    """Return column ``key`` or "messages", whichever the row has, and its string or checked messages."""
    column = key if row.get(key) is not None else "messages"
    prompt = row.get(column)
    if prompt is None:
        found = ", ".join(f"{name} (null)" if value is None else name for name, value in row.items()) or "no column"
        raise GrpoError(f'no prompt: expected a column "{key}" (--prompt-key) or "messages", found {found}')
    if isinstance(prompt, str) and (messages_in_text := messages_of_text(prompt)) is not None:
        prompt = messages_in_text
    if isinstance(prompt, str):
        _check_text(f'"{column}"', prompt)
        return column, prompt
    if not isinstance(prompt, list):
        raise GrpoError(f'"{column}" must be a string or a list of messages, found {kind(prompt)}')
    if not prompt:
        raise GrpoError(f'"{column}" is an empty list of messages')
    messages = [
        _check_message(f'message {number} of "{column}"', message, media) for number, message in enumerate(prompt, 1)
    ]
    return column, messages


def _after_system(messages: list[dict[str, Any]], column: str, system: str | None) -> list[dict[str, Any]]:
    """Return the messages after the one of --system-prompt; GrpoError if they have one of their own."""
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise GrpoError(
            f'"{column}" has a system message, and --system-prompt is given: leave one of them out (--system-prompt "" '
            "takes back that of a launch script)"
        )
    return [{"role": "system", "content": system}, *messages]


def messages_of_text(text: str) -> list[Any] | None:
    """Return the chat messages of which a text is the JSON, as in data sets with a column of strings, else None."""
    if not text.lstrip().startswith("["):
        return None
    messages = json_column(text)
    are_messages = (
        isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)
    )
    return messages if are_messages else None


def check_media(row: Mapping[str, Any], media: Collection[str], family: str) -> None:
    """Raise GrpoError for a row with images, video or sound that the model family does not take (see ``media``)."""
    for column in _MEDIA:
        if column.removesuffix("s") not in media and row.get(column):
            names = ["text", *(f"{medium}s" for medium in media)]
            supported = f"{', '.join(names[:-1])} and {names[-1]} are" if media else "text is"
            of_family = f" with model family {family}" if media else ""
            raise GrpoError(
                f'"{column}" is not empty, but only {supported} supported{of_family}: leave out the column, or the row'
            )


def longest_text(prompt: str | list[dict[str, Any]]) -> int:
    """Return the characters of the longest text that a prompt has for certain.

    A chat template may leave out parts of the assistant's messages.
    """
    if isinstance(prompt, str):
        return len(prompt)
    texts = [message["content"] for message in prompt if message["role"] != "assistant"]
    return max((len(text) for content in texts for text in _texts(content)), default=0)


def _texts(content: str | list[dict[str, Any]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _check_message(name: str, message: Any, media: Collection[str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise GrpoError(f'{name} must be an object with "role" and "content", found {kind(message)}')
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message:
        raise GrpoError(f'{name} has no "role"')
    _check_text(f'"role" of {name}', message["role"])
    if message["role"] not in ROLES:
        raise GrpoError(f'"role" of {name} is {message["role"]!r}: expected one of {", ".join(ROLES)}')
    if message["role"] == "assistant" and message.get("tool_calls") and not message.get("content"):
        return message | {"content": ""}  # a message of tool calls only
    if "content" not in message:
        raise GrpoError(f'{name} has no "content"')
    if media and isinstance(message["content"], list):
        message["content"] = [
            _check_part(f'part {number} of "content" of {name}', part, media)
            for number, part in enumerate(message["content"], 1)
        ]
    else:
        _check_text(f'"content" of {name}', message["content"])
    return message


def _check_part(name: str, part: Any, media: Collection[str]) -> dict[str, Any]:
    types = ["text", *media, "image_url"]
    if not isinstance(part, dict) or part.get("type") not in types:
        expected = ", ".join(f'"{kind}"' for kind in types[:-1])
        raise GrpoError(f'{name} must be an object with "type" {expected} or "{types[-1]}", found {part!r:.100}')
    if part["type"] == "text":
        _check_text(f'"text" of {name}', part.get("text"))
    return {key: value for key, value in part.items() if value is not None}


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
    """Return the row's ``tools`` for the chat template: a list of objects; None without tools.

    The column holds the list or its JSON text, which Parquet needs for tools that differ in structure. Raises GrpoError
    with the expected format.
    """
    column = row.get("tools")
    tools = json_column(column)
    if column is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and tool for tool in tools):
        raise GrpoError(f'"tools" must be a list of objects, or JSON text of one, found {column!r:.200}')
    if isinstance(prompt, str):
        raise GrpoError('"tools" needs a prompt of chat messages: only a chat template shows tools to the model')
    return tools


def parse_template_variables(row: Mapping[str, Any], prompt: str | list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row's ``chat_template_kwargs``, an object or its JSON text; {} without one."""
    column = row.get("chat_template_kwargs")
    variables = json_column(column)
    if column is None:
        return {}
    if not isinstance(variables, dict):
        raise GrpoError(f'"chat_template_kwargs" must be an object, or JSON text of one, found {column!r:.200}')
    if variables and isinstance(prompt, str):
        raise GrpoError('"chat_template_kwargs" needs a prompt of chat messages: a string is not put into a template')
    return variables


def pass_rate(row: Mapping[str, Any]) -> float:
    """Return the row's pass rate, the fraction of a policy's attempts that solved it (0 to 1).

    Raises GrpoError for a missing or invalid value.
    """
    rate = row.get("pass_rate")
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate <= 1:
        raise GrpoError(
            f'"pass_rate" is {rate!r}: --curriculum, --min-pass-rate and --max-pass-rate need a number from 0 to 1 in '
            "every row"
        )
    return float(rate)


def without_merged_nulls(row: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a row of a table without the null keys of objects in the columns that are prompts, tools and calls.

    Parquet and Arrow give every object the keys of all objects of its column. Chat templates test for the presence of a
    key, and an argument that no call has is not one that is null. A null that is meant needs a column of JSON text.
    """
    columns = {key, "messages", "tools", "tool_calls", "chat_template_kwargs"}
    return {name: _without_nulls(value) if name in columns else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
