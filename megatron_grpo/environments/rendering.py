"""Tokens of what an environment says, as the chat template renders it behind a sampled turn.

What the policy sampled is never rendered again. The tokens of new messages are those behind the policy's turn in the
template's rendering of the whole conversation. Two renderings, with different made-up texts of the policy's turn, find
this place: they end alike from the end of the turn on.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_grpo.data.tokenizer import ChatTokenizer
from megatron_grpo.utils.errors import GrpoError

Message = dict[str, Any]


class Mark(NamedTuple):
    """A special token of an episode, where its ids and the text of them can be parted.

    Special tokens are encoded and decoded apart from what is around them.
    """

    tokens: int  # before it
    characters: int  # before it
    end: int  # characters with it
    digest: bytes  # of these characters


class TurnRenderer:
    """Renders messages behind a turn of the policy; ``end_token_ids`` are the tokens that end a turn."""

    def __init__(self, tokenizer: ChatTokenizer, end_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._special = set(tokenizer.special_tokens.values())
        self.ends = [tokenizer.decode([token], skip_special_tokens=False) for token in end_token_ids]

    def after_turn(
        self,
        messages: Sequence[Message],
        turn: Message,
        new: Sequence[Message],
        last_token: int,
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids between a turn of the policy and its next one.

        They are the end of the turn, unless the policy sampled it as ``last_token``, the ``new`` messages, and the
        generation prompt. ``messages`` are those before the turn; of ``turn`` only the names of tool calls are read.
        GrpoError if the template refuses the messages or does not show them.
        """
        tail = self._tail(messages, turn, new, tools, variables)
        ids = self._tokenizer.encode_after(last_token if last_token in self._special else self._end_token_ids[0], tail)
        return self._without_sampled_end(ids, last_token)

    def whole(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation as the template renders it, with the generation prompt."""
        return self._tokenizer.apply_chat_template(list(messages), tools, variables)

    def text(self, messages: Sequence[Message], tools: list[Any] | None, variables: Mapping[str, Any]) -> str:
        """Return the text of `whole`."""
        return self._tokenizer.render_chat(list(messages), tools, variables)

    def rewritten(
        self,
        so_far: Sequence[int],
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        marks: Sequence[Mark] = (),
    ) -> tuple[list[int] | None, Sequence[Mark]]:
        """Return None if the text of ``so_far``, without a sampled end of turn, begins a conversation as the template
        renders it, or else the ids of `whole`; and the marks of these ids for the next turn.

        Only what follows the newest of the ``marks`` of ``so_far`` is decoded and encoded.
        """
        text = self.text(messages, tools, variables or {})
        while marks and marks[-1].digest != _digest(text[: marks[-1].end]):
            marks = marks[:-1]
        tokens, characters = (marks[-1].tokens, marks[-1].characters) if marks else (0, 0)
        sampled, rest = list(so_far[tokens:]), text[characters:]
        spoken = self._decoded(sampled[:-1] if sampled[-1] in self._end_token_ids else sampled)
        new = None
        if not rest.startswith(spoken):
            if marks:
                special = sampled[0]
                new = [special, *self._tokenizer.encode_after(special, rest.removeprefix(self._decoded([special])))]
            else:
                new = self.whole(messages, tools, variables)
            if self._decoded(new).startswith(spoken):  # the tokenizer does not keep every text
                new = None
        marks = (*marks, *self._mark(sampled if new is None else new, text, tokens, characters))
        return None if new is None else [*so_far[:tokens], *new], marks

    def _mark(self, ids: list[int], text: str, tokens: int, characters: int) -> list[Mark]:
        """Return the mark before the last special token of ``ids``; none if ``text`` does not show it there.

        The text of ``ids`` begins at the character ``characters`` of ``text``; ``tokens`` are before ``ids``.
        """
        places = (place for place in range(len(ids) - 1, 0, -1) if ids[place] in self._special)
        # The policy may have sampled another end of turn than the template renders: the special token before it fits.
        for place in itertools.islice(places, 3):
            before, special = self._decoded(ids[:place]), self._decoded([ids[place]])
            if text.startswith(before + special, characters):
                begin = characters + len(before)
                end = begin + len(special)
                return [Mark(tokens + place, begin, end, _digest(text[:end]))]
        return []

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _tail(self, messages, turn: Message, new: Sequence[Message], tools, variables: Mapping[str, Any] | None) -> str:
        """Return the rendered text from the end of the policy's turn on."""

        def rendered(text: str, messages_after: Sequence[Message]) -> str:
            made_up: Message = {"role": "assistant", "content": text}
            if calls := turn.get("tool_calls"):
                # Some templates show no text with tool calls; Gemma 4's shows it behind the tools' answers.
                made_up["content"] = ""
                made_up["tool_calls"] = [
                    {**call, "function": {"name": call["function"]["name"], "arguments": {"a": text}}} for call in calls
                ]
            conversation = [*messages, made_up, *messages_after]
            return self._tokenizer.render_chat(conversation, tools, variables)

        first, second = rendered("A", new), rendered("B", new)
        if first == second:
            raise GrpoError("the chat template does not show the assistant's turns, so no turn can follow another")
        for number, message in enumerate(new):
            other = [*new[:number], {**message, "content": _changed(message["content"])}, *new[number + 1 :]]
            if rendered("A", other) == first:
                raise GrpoError(
                    f"the chat template does not show a message of the role {message['role']}: "
                    "give --tool-role user, or the role that the template has for tools"
                )
        same = _common_end(first, second)
        # Behind the text there may be tool calls, then the end of the turn.
        places = [place for end in self.ends if (place := same.find(end)) >= 0]
        return same[min(places) :] if places and turn.get("tool_calls") else same

    def _without_sampled_end(self, ids: list[int], last_token: int) -> list[int]:
        """Return ``ids`` without the end of the turn if the policy sampled one.

        Where the sampled end differs from the template's (Llama's <|eom_id|>, gpt-oss's <|return|>), the template's is
        left out, too, unless it is the role of the next message (GLM).
        """
        if last_token not in self._end_token_ids or not ids:
            return ids
        if ids[0] == last_token:
            return ids[1:]
        rest = self._tokenizer.decode(ids[1:], skip_special_tokens=False).lstrip()
        begins_next = any(rest.startswith(name) for name in self._tokenizer.special_tokens)
        return ids[1:] if ids[0] in self._special and begins_next else ids


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _changed(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return f"{content}?" if isinstance(content, str) else [*content, {"type": "text", "text": "?"}]


def _common_end(first: str, second: str) -> str:
    """Return the longest text with which both end."""
    length = next((i for i, (a, b) in enumerate(zip(reversed(first), reversed(second))) if a != b), 0)
    return first[len(first) - length :]
