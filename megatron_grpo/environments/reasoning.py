"""Where the reasoning of a turn is: its text is kept in the conversation, but no tool call is read in it.

Reasoning stands between marks such as <think> and </think>. A turn begins within it where the chat template ends the
prompt with the first mark, and where the policy writes the second mark without the first. Reasoning without an end
reaches to the end of the turn.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import cachetools

from megatron_grpo.utils.errors import GrpoError

_MOST_PARSERS = 20  # rows may each have variables of their own
THINK = ("<think>", "</think>")
_MARKS = (
    THINK,
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
)


class Marks(NamedTuple):
    """Texts between which reasoning stands."""

    start: str
    end: str


def marks_of(chat_template: str | None) -> Marks:
    """Return the marks that a chat template writes; <think> and </think> if it has none: a prompt may ask for them."""
    found = [marks for marks in _MARKS if marks[1] in (chat_template or "")]
    return Marks(*(found[0] if found else THINK))


class ReasoningParser:
    """A reasoning parser of vLLM, by its name (--reasoning-parser)."""

    def __init__(self, name: str, tokenizer: Any):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager

        if name not in ReasoningParserManager.list_registered():
            known = ", ".join(ReasoningParserManager.list_registered())
            raise GrpoError(f"--reasoning-parser {name}: vLLM has no reasoning parser of this name; it has {known}")
        self._name, self._tokenizer = name, tokenizer
        try:
            self._kind = ReasoningParserManager.get_reasoning_parser(name)
        except ImportError as error:
            raise GrpoError(f"--reasoning-parser {name}: vLLM cannot import it: {error}") from error
        self._request = ChatCompletionRequest(messages=[], seed=None)
        self._made: cachetools.LRUCache[str, Any] = cachetools.LRUCache(_MOST_PARSERS)
        self._parser({})

    def _parser(self, variables: Mapping[str, Any]) -> Any:
        """Return the parser for these variables of the chat template: enable_thinking says how a turn begins."""
        key = repr(sorted(variables.items()))
        if key not in self._made:
            try:
                self._made[key] = self._kind(self._tokenizer, chat_template_kwargs=dict(variables))
            # A parser looks up the family's special tokens, and raises RuntimeError if the vocabulary lacks them.
            except (RuntimeError, ValueError) as error:
                raise GrpoError(f"--reasoning-parser {self._name} does not fit the tokenizer: {error}") from error
        return self._made[key]

    def marks(self, variables: Mapping[str, Any]) -> Marks | None:
        """Return the parser's marks; None if it has none."""
        parser = self._parser(variables)
        start, end = getattr(parser, "reasoning_start_str", None), getattr(parser, "reasoning_end_str", None)
        return Marks(start, end) if start and end else None

    def split(self, text: str, before: str, variables: Mapping[str, Any]) -> tuple[str, str]:
        """Return (reasoning, what follows) of a turn without the mark that ends reasoning, as vLLM divides it.

        Of a turn with this mark vLLM's parsers are not asked: some let a call within reasoning end it. ``before`` is
        the end of the prompt.
        """
        marks = self.marks(variables)
        if marks is not None and before.rstrip().endswith(marks.end):
            return "", text  # the prompt has ended the reasoning
        try:
            reasoning, content = self._parser(variables).extract_reasoning(text, self._request)
        except NotImplementedError as error:
            raise GrpoError(
                f"--reasoning-parser {self._name} reads no text ({error}): leave it out, --tool-call-parser openai "
                "reads the channels of gpt-oss itself"
            ) from error
        if content is None:
            return (text, "") if reasoning else ("", text)
        place = text.rfind(content)
        return (text[:place], text[place:]) if place >= 0 else (reasoning or "", content)
