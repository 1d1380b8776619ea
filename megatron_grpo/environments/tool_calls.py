"""Tool calls in what the policy said, read by vLLM's own parsers (--tool-call-parser).

vLLM's parsers return no call of a turn in which one call is wrong. So a turn is cut first, at the marks with which its
format begins and ends a call, and each part goes to the parser alone. A part in which the parser finds no call is a
`MalformedCall`. Reasoning is set aside before that (reasoning.py): nothing is called in it.

| format | a call |
|---|---|
| hermes | <tool_call>{"name": .., "arguments": {..}}</tool_call> |
| glm45, qwen3_coder | <tool_call> .. </tool_call>, with arguments as texts: their types follow from the tools |
| qwen3_coder | <function=NAME> .. </function>, too, without the tags around it |
| deepseek_v3, kimi_k2 | between marks, in a section of calls |
| mistral | [TOOL_CALLS] before a list of calls, or before each call |
| gemma4 | <|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,null]}<tool_call|>, read here (`_json_of_gemma`) |
| openai | a message to functions.NAME, read from token ids: gpt-oss has its marks as tokens |
| llama3_json | no marks: `_objects` has the rule |

Of any other format vLLM's parser gets the whole turn.
"""

import ast
import itertools
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cachetools

from megatron_grpo.environments.environment import MalformedCall, Message, ToolCall
from megatron_grpo.environments.reasoning import Marks, ReasoningParser, marks_of
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.packages import require

OPENAI = "openai"
_MOST_READERS = 128  # rows may each have tools of their own
_MOST_ARGUMENTS = 200  # of a call: vLLM's parsers of texts take time with the square of their number


@dataclass(frozen=True)
class _Format:
    """Marks of a format. ``section``: the marks around all calls of a turn, without which the parser reads none."""

    start: str
    end: str | None = None  # None: a call reaches to the next one
    section: tuple[str, str] | None = None
    holds_json: bool = False  # between the marks is {"name": .., "arguments": {..}}
    quote: str | None = None  # a mark around texts. vLLM's parser makes texts of the values in lists and objects, too
    texts: "_Texts | None" = None  # arguments are texts


@dataclass(frozen=True)
class _Texts:
    """Patterns of a whole call with arguments as texts: ``head``, for each argument ``key`` and a value, ``tail``."""

    head: re.Pattern[str]
    key: re.Pattern[str]
    tail: re.Pattern[str]
    edge: re.Pattern[str]  # no mark of arguments is in a value: where one is missing, vLLM loses arguments
    value_end: str
    untagged: tuple[str, str] | None = None  # marks of a call without those of the format


_GLM = _Texts(
    head=re.compile(r"<tool_call>[^<]+"),
    key=re.compile(r"\s*<arg_key>[^<]*</arg_key>\s*<arg_value>"),
    tail=re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)"),
    edge=re.compile(r"<arg_key>|</?arg_value>"),
    value_end="</arg_value>",
)
_CODER = _Texts(
    head=re.compile(r"(?:<tool_call>[^<]*)?<function=[^<>\n]+>"),
    key=re.compile(r"\s*<parameter=[^<>\n]*>"),
    tail=re.compile(r"\s*</function>(?:[^<]*</tool_call>)?"),
    edge=re.compile(r"<parameter=|</parameter>"),
    value_end="</parameter>",
    untagged=("<function=", "</function>"),
)
_JSON_TAGS = _Format("<tool_call>", "</tool_call>", holds_json=True)
_GLM_TAGS = _Format("<tool_call>", "</tool_call>", texts=_GLM)
_CODER_TAGS = _Format("<tool_call>", "</tool_call>", texts=_CODER)
_DEEPSEEK = _Format("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"))
_KIMI = _Format(
    "<|tool_call_begin|>", "<|tool_call_end|>", ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
)
_FORMATS = {
    "hermes": _JSON_TAGS,
    "qwen3_json": _JSON_TAGS,
    "glm45": _GLM_TAGS,
    "glm47": _GLM_TAGS,
    "qwen3_coder": _CODER_TAGS,
    "qwen3_xml": _CODER_TAGS,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "kimi_k2": _KIMI,
    "mistral": _Format("[TOOL_CALLS]"),
    "gemma4": _Format("<|tool_call>", "<tool_call|>", quote='<|"|>'),
}
_LLAMA = ("llama3_json", "llama4_json")
_PYTHON_TAG = "<|python_tag|>"
_TRIES = 1000  # objects of a turn that are no JSON: with more no call is looked for, each try reads what follows
_OBJECT = re.compile(r'\{\s*"')
_CALL_OBJECT = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"\s*:')  # as calls of Llama begin
_BRACE = re.compile(r"\s*\{")
_BRACKET = re.compile(r"\s*\[")
_GEMMA_CALL = re.compile(r"\s*call:([^\s{}]+)(\{.*\})\s*", re.DOTALL)
_GEMMA_KEY = re.compile(r"(?<=[{,])[^][{},:]+(?=:)")
_NAMES = (  # of the tool in a call that cannot be read
    re.compile(r'"name"\s*:\s*"([^"\s]+)"'),
    re.compile(r"<function=([^>\s]+)"),
    re.compile(r"functions\.([^:\s<]+)"),
    re.compile(r"<｜tool▁sep｜>(\S+)"),
    re.compile(r"<tool_call>\s*([^<{}\s]+)"),
    re.compile(r"<\|tool_call>\s*call:([^{}\s<]+)"),
    re.compile(r"\[TOOL_CALLS\]\s*([^\[{\s]+)"),
)


class _Part(NamedTuple):
    """A part of a turn that is a call: where it is in the text, and what the parser gets."""

    begin: int
    end: int
    text: str
    body: str | None = None  # {"name": .., "arguments": {..}}, where the format has that
    complete: bool = True  # has an end
    broken: bool = False  # is no whole call: the parser might find one in it that lacks arguments
    hidden: str = ""  # the letter that the parser gets for < in values, which may hold marks of the format


class _Call(NamedTuple):
    """A call as vLLM returns it; ``arguments`` is JSON text, ``id`` None or an id that vLLM may have made up."""

    name: str
    arguments: str
    id: str | None


@dataclass(frozen=True)
class ParsedTurn:
    """What the policy said in a turn. ``text`` is all but the calls; ``reasoning`` is the part of it that is that."""

    text: str
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[MalformedCall] = field(default_factory=list)
    reasoning: str = ""
    # With the calls that cannot be read: what a client of OpenAI's protocol gets.
    text_with_malformed: str = ""
    thinking: bool = False  # the chat template takes reasoning beside the text, which does not have it

    @property
    def message(self) -> Message:
        """The turn in the conversation. A call that cannot be read is there, too, since an answer follows it."""
        said: dict[int, tuple[str, str, Any]] = {call.place: (call.id, call.name, {}) for call in self.malformed}
        places = iter(place for place in range(len(said) + len(self.calls)) if place not in said)
        said |= {next(places): (call.id, call.name, call.arguments) for call in self.calls}
        calls = [
            {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
            for _, (identity, name, arguments) in sorted(said.items())
        ]
        message = {"role": "assistant", "content": self.text}
        message |= {"thinking": self.reasoning} if self.thinking and self.reasoning else {}
        return message | ({"tool_calls": calls} if calls else {})


class _Reader:
    """vLLM's parser of a format, with the tools of a row."""

    def __init__(self, kind: Any, tokenizer: Any, tools: Sequence[Mapping[str, Any]], holds_types: bool):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        functions = [_plain_function(tool["function"]) for tool in tools]
        self.schemas = {function["name"]: _properties(function) for function in functions}
        # Arguments in JSON have types. vLLM would make texts of those for which the schema has none.
        without = {"parameters": None} if holds_types else {}
        given: list[Any] = [{"type": "function", "function": function | without} for function in functions]
        self._request = ChatCompletionRequest(messages=[], tools=given or None, seed=None)
        self._parser = kind(tokenizer, self._request.tools)

    def read(self, text: str) -> tuple[str, list[_Call]]:
        """Return the text without calls, and the calls; no call where the parser raises an error."""
        try:
            found = self._parser.extract_tool_calls(text, self._request)
        # The parsers swallow most errors that a malformed call causes, and raise a few (a name that is a number).
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
            return text, []
        calls = [_Call(call.function.name, call.function.arguments, call.id) for call in found.tool_calls or ()]
        return found.content or "", calls

    def read_ids(self, ids: Sequence[int]) -> tuple[str, str, list[_Call]]:
        """Return (reasoning, text, calls) of a turn of gpt-oss."""
        reasoning, text, calls = self._parser.parse("", self._request, model_output_token_ids=list(ids))
        return reasoning or "", text or "", [_Call(call.name, call.arguments, None) for call in calls or ()]


class ToolCallParser:
    """The parser of a model family; ``name`` as vLLM's --tool-call-parser ("hermes", "llama3_json", "deepseek_v3").

    ``tokenizer`` is that of transformers, and ``reasoning`` the name of a reasoning parser of vLLM; without one the
    marks of the chat template decide.
    """

    def __init__(self, name: str, tokenizer: Any, reasoning: str | None = None):
        require(f"--tool-call-parser {name}, a parser of vLLM,", "vllm")
        from vllm.tokenizers.hf import get_cached_tokenizer

        # Each of vLLM's parsers asks for the vocabulary, and transformers makes another copy for each.
        self.name, self._tokenizer = name, get_cached_tokenizer(tokenizer)
        if name == OPENAI and reasoning not in (None, "openai_gptoss"):
            raise GrpoError(
                f"--reasoning-parser {reasoning} cannot be used with --tool-call-parser {OPENAI}, which reads the "
                "channels of gpt-oss itself: leave it out"
            )
        self._kind = _harmony() if name == OPENAI else _parser_class(name)
        self._reasoning = ReasoningParser(reasoning, self._tokenizer) if reasoning and name != OPENAI else None
        template = tokenizer.chat_template
        self._marks = marks_of(template if isinstance(template, str) else json.dumps(template))
        # vLLM logs a traceback for each malformed call; a policy makes many.
        for module in (self._kind.__module__, "vllm.parser"):
            logging.getLogger(module).setLevel(logging.CRITICAL)
        self._readers: cachetools.LRUCache[str, _Reader] = cachetools.LRUCache(_MOST_READERS)
        self._reader(())

    @property
    def is_vllms(self) -> bool:
        """Whether the parser is one of vLLM's, not one of a file of --external-plugins."""
        return self.name == OPENAI or self._kind.__module__.startswith("vllm.")

    @property
    def _is_of_texts(self) -> bool:
        return self.name in _FORMATS and _FORMATS[self.name].texts is not None

    def after_reasoning(self, text: str, variables: Mapping[str, Any] | None = None) -> str:
        """Return a text behind reasoning, as --reasoning-parser needs it: templates leave out earlier reasoning."""
        marks = self._reasoning.marks(variables or {}) if self._reasoning is not None else None
        return text if marks is None or marks.end in text else f"{marks.start}{marks.end}{text}"

    def check(self, tools: Sequence[Any]) -> None:
        """Raise GrpoError for tools that vLLM does not accept."""
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
            raise GrpoError(f"tools must be a list of objects, found {tools!r:.200}")
        self._reader(tools)

    def parse(
        self,
        text: str,
        tools: Sequence[Any] | None = None,
        ids: Sequence[int] = (),
        before: str = "",
        number: int = 0,
        cut: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> ParsedTurn:
        """Return what a turn says: its ``text`` without the end of turn, and its token ids with it.

        ``tools`` are those that the policy was shown, and give the types of arguments. ``before`` is the end of the
        prompt, ``number`` that of the turn in its episode, ``variables`` those of the chat template. A call without an
        end is text in a turn that was ``cut`` at a limit.
        """
        reader = self._reader(tools or ())
        if self.name == OPENAI:
            return self._parse_ids(ids, reader, number)
        own_marks = self._reasoning.marks(variables or {}) if self._reasoning is not None else None
        marks = own_marks or self._marks
        opened = before.rstrip().endswith(marks.start)
        set_aside, rest = "", text
        if self._reasoning is not None and marks.end not in text:
            set_aside, rest = self._reasoning.split(text, before, variables or {})
            opened = opened and own_marks is None
        scanned = _scan(rest, _FORMATS.get(self.name), marks, opened)
        reasoning = set_aside + "".join(rest[begin:end] for begin, end in scanned.reasoning)
        after_reasoning = scanned.reasoning[-1][1] if scanned.reasoning else 0
        parts = scanned.parts
        if self.name in _LLAMA:
            parts = list(_objects(rest, after_reasoning))
        elif self.name not in _FORMATS:
            content, found = reader.read(rest[after_reasoning:])
            sorted_calls = self._sort([([call], f"{call.name} {call.arguments}") for call in found], reader, number)
            spoken = set_aside + (rest[:after_reasoning] + content if found else rest)
            return ParsedTurn(spoken, *sorted_calls, reasoning, spoken)
        if cut and parts and not parts[-1].complete:
            parts = parts[:-1]
        read = [(self._calls_of(part, reader), rest[part.begin : part.end]) for part in parts]
        calls, malformed = self._sort(read, reader, number)
        bad = {call.text for call in malformed}
        good = [part for part, (_, said) in zip(parts, read, strict=True) if said not in bad]
        return ParsedTurn(
            set_aside + self._without(rest, parts),
            calls,
            malformed,
            reasoning,
            set_aside + self._without(rest, good),
        )

    def _parse_ids(self, ids: Sequence[int], reader: _Reader, number: int) -> ParsedTurn:
        reasoning, text, found = reader.read_ids(ids)
        read = [([call], f"{call.name} {call.arguments}") for call in found]
        said = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        if not found and said.endswith("<|call|>"):  # to no function
            read = [([], said)]
        return ParsedTurn(text, *self._sort(read, reader, number), reasoning, text, thinking=True)

    def _reader(self, tools: Sequence[Any]) -> _Reader:
        """Return the parser for these tools, which are functions, or {"type": "function", "function": ..}."""
        wrapped = [tool if isinstance(tool.get("function"), Mapping) else {"function": tool} for tool in tools]
        named = [tool for tool in wrapped if isinstance(tool["function"].get("name"), str)]
        key = json.dumps(named, sort_keys=True, default=str)
        if key not in self._readers:
            # A parser looks up the family's special tokens, and raises RuntimeError if the vocabulary lacks them.
            try:
                holds_types = self.name in (OPENAI, *_LLAMA, *_FORMATS) and not self._is_of_texts
                self._readers[key] = _Reader(self._kind, self._tokenizer, named, holds_types)
            except (RuntimeError, ValueError) as error:
                what = "the tools" if named else "the tokenizer"
                raise GrpoError(f"--tool-call-parser {self.name} does not fit {what}: {error}") from error
        return self._readers[key]

    def _calls_of(self, part: _Part, reader: _Reader) -> list[_Call]:
        if part.broken or (part.body is not None and _fault_of_json(part.body)):
            return []
        if self.name in _FORMATS and _FORMATS[self.name].quote:
            call = json.loads(part.body or "")
            return [_Call(call["name"], json.dumps(call["arguments"]), None)]
        if self._is_of_texts and _has_too_many_arguments(part.text):
            return []
        found = reader.read(part.text)[1]
        if part.hidden:
            found = [call._replace(arguments=call.arguments.replace(part.hidden, "<")) for call in found]
        return found

    def _sort(
        self, read: Sequence[tuple[Sequence[_Call], str]], reader: _Reader, number: int
    ) -> tuple[list[ToolCall], list[MalformedCall]]:
        """Return the calls of (what the parser found in a part, the part's text), and those that are malformed."""
        calls: list[ToolCall] = []
        malformed: list[MalformedCall] = []
        own_ids: set[str] = set()
        for found, text in read:
            if not found:
                place = len(calls) + len(malformed)
                fault = self._fault(text, reader)
                malformed.append(MalformedCall(text, fault, _id(number, place), _name_in(text), place))
            for call in found:
                place = len(calls) + len(malformed)
                arguments = _arguments(call)
                if isinstance(arguments, str):
                    name = call.name or _name_in(text)
                    malformed.append(MalformedCall(text, arguments, _id(number, place), name, place))
                    continue
                if self._is_of_texts:
                    arguments = _typed(arguments, reader.schemas.get(call.name, {}))
                # An id in the text is the policy's own; others are vLLM's, and random.
                own_id = call.id if call.id and call.id in text and call.id not in own_ids else None
                own_ids |= {own_id} if own_id else set()
                identity = own_id or _id(number, place)
                calls.append(ToolCall(call.name, arguments, identity))
        return calls, malformed

    def _fault(self, text: str, reader: _Reader) -> str:
        """Return what is wrong with a part in which the parser found no call."""
        own, name = _FORMATS.get(self.name), _name_in(text)
        body = text.removeprefix(own.start).removesuffix(own.end or "") if own else text.removeprefix(_PYTHON_TAG)
        body = body.strip(" ;\n").lstrip("[,").strip()
        is_json = self.name in _LLAMA or (own is not None and (own.holds_json or (own.end is None and body[:1] == "{")))
        if is_json and (fault := _fault_of_json(body)):
            return fault
        if self._is_of_texts and _has_too_many_arguments(text):
            return f"it has more than {_MOST_ARGUMENTS} arguments"
        if reader.schemas and name not in (*reader.schemas, MalformedCall.name):
            return f"there is no tool {name}; the tools are {', '.join(reader.schemas)}"
        if own is not None and own.section and text.startswith(own.section[0]):
            return f"between {own.section[0]} and {own.section[1]} is no {own.start}"
        if own is not None and own.end is not None and own.end not in text:
            return f"it has no {own.end}"
        return "it does not have the form that the instructions for tools describe"

    def _without(self, text: str, parts: Sequence[_Part]) -> str:
        """Return a turn's text without these parts, and without the marks around them."""
        if not parts:
            return text
        edges = [0, *(edge for part in parts for edge in (part.begin, part.end)), len(text)]
        rest = "".join(text[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True))
        own = _FORMATS.get(self.name)
        for mark in (own.section or ()) if own else (_PYTHON_TAG,):
            rest = rest.replace(mark, "")
        return rest.rstrip()


def _parser_class(name: str) -> Any:
    """Return vLLM's class of a parser; GrpoError with the names that there are."""
    from vllm.tool_parsers import ToolParserManager

    if name not in ToolParserManager.list_registered():
        known = ", ".join(ToolParserManager.list_registered())
        raise GrpoError(f"--tool-call-parser {name}: vLLM has no parser of this name; it has {known}")
    try:
        return ToolParserManager.get_tool_parser(name)
    except ImportError as error:
        raise GrpoError(f"--tool-call-parser {name}: vLLM cannot import it: {error}") from error


def _harmony() -> Any:
    """Return vLLM's parser of gpt-oss, which reads token ids. Its class of the name openai reads nothing."""
    from openai_harmony import HarmonyError
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
    from vllm.parser.harmony import HarmonyParser
    from vllm.reasoning.gptoss_reasoning_parser import GptOssReasoningParser
    from vllm.tool_parsers.gptoss_tool_parser import GptOssToolParser

    try:  # later the parser would swallow this error, and find no call
        get_encoding()
    except (HarmonyError, OSError, ValueError) as error:
        raise GrpoError(
            f"--tool-call-parser {OPENAI}: openai_harmony cannot load the vocabulary of gpt-oss: {error}. Download "
            "o200k_base.tiktoken, and set TIKTOKEN_ENCODINGS_BASE to its folder"
        ) from error
    # Without the two classes it returns neither calls nor reasoning.
    return type(
        "GptOssParser",
        (HarmonyParser,),
        {
            "__module__": HarmonyParser.__module__,
            "tool_parser_cls": GptOssToolParser,
            "reasoning_parser_cls": GptOssReasoningParser,
        },
    )


# ---- parts of a turn


class _Scanned(NamedTuple):
    reasoning: list[tuple[int, int]]
    parts: list[_Part]


def _scan(text: str, own: _Format | None, marks: Marks, opened: bool) -> _Scanned:
    """Return where a turn's reasoning is, and the parts that are calls of the format ``own``.

    The turn begins in reasoning if it is ``opened``. Marks of reasoning within a call are the call's text.
    """
    starts = [*([own.section[0]] if own.section else []), own.start] if own else []
    starts += [own.texts.untagged[0]] if own and own.texts and own.texts.untagged else []
    pattern = re.compile(_either(*marks, *starts))
    reasoning: list[tuple[int, int]] = []
    parts: list[_Part] = []
    place = begin = 0
    inside = opened
    while place < len(text):
        if inside:
            end = text.find(marks.end, place)
            place = len(text) if end < 0 else end + len(marks.end)
            reasoning.append((begin, place))
            inside = False
        elif (mark := pattern.search(text, place)) is None:
            break
        elif mark[0] == marks.start:
            begin, place, inside = mark.start(), mark.end(), True
        elif mark[0] == marks.end:  # everything before was reasoning
            reasoning, parts, place = [(0, mark.end())], [], mark.end()
        else:
            assert own is not None
            new = list(_parts(text, own, mark))
            parts += new
            place = max(new[-1].end, mark.end())
    if inside:  # the mark ends the text
        reasoning.append((begin, len(text)))
    return _Scanned(reasoning, parts)


def _parts(text: str, own: _Format, mark: re.Match[str]) -> Iterator[_Part]:
    """Return the parts of the call, or of the section of calls, that begins at a mark; at least one."""
    begin, after = mark.span()
    if own.section and mark[0] == own.section[0]:
        end = text.find(own.section[1], after)
        last = len(text) if end < 0 else end
        starts = [place.start() for place in re.compile(re.escape(own.start)).finditer(text, after, last)]
        if not starts:
            last = last if end < 0 else end + len(own.section[1])
            yield _Part(begin, last, text[begin:last], complete=end >= 0)
        for start, following in zip(starts, [*starts[1:], last]):
            own_end, complete = _end(text, own, start + len(own.start), following)
            yield _Part(start, own_end, f"{own.section[0]}{text[start:own_end]}{own.section[1]}", complete=complete)
    elif own.texts is not None and (whole := _whole(text, own, begin)) is not None:
        yield whole
    elif own.holds_json:
        assert own.end is not None
        place = _json_end(text, after) or after  # marks before it are in an argument
        last, complete = _end(text, own, place, _mark_or_end(text, own.start, place))
        body = text[after:last].removesuffix(own.end)
        said = f"{own.start}{_escaped(body, own.end)}{own.end if text.endswith(own.end, after, last) else ''}"
        yield _Part(begin, last, said, body, complete)
    elif own.quote:
        edges = re.compile(f"{re.escape(own.quote)}.*?{re.escape(own.quote)}|{_either(own.start, own.end)}", re.DOTALL)
        edge = next((edge for edge in edges.finditer(text, after) if not edge[0].startswith(own.quote)), None)
        last = len(text) if edge is None else edge.end() if edge[0] == own.end else edge.start()
        call = _json_of_gemma(text[after:last].removesuffix(own.end or ""), own.quote)
        yield _Part(begin, last, text[begin:last], call, edge is not None, broken=call is None)
    elif own.end is None:
        if re.compile(r"\s*[\[{]").match(text, after):
            yield from _elements(text, own.start, begin)
        else:
            last = _mark_or_end(text, own.start, after)
            yield _Part(begin, last, text[begin:last])
    else:
        either = re.compile(_either(own.start, mark[0])).search(text, after)
        last, complete = _end(text, own, after, either.start() if either else len(text))
        yield _Part(begin, last, text[begin:last], complete=complete, broken=True)


def _either(*marks: str | None) -> str:
    return "|".join(re.escape(mark) for mark in marks if mark)


def _whole(text: str, own: _Format, begin: int) -> _Part | None:
    """Return the call with arguments as texts that begins at ``begin``; None if it is not whole."""
    assert own.texts is not None and own.end is not None
    head = own.texts.head.match(text, begin)
    place = head.end() if head else begin
    edges = [begin]
    while head and (key := own.texts.key.match(text, place)) is not None:
        edge = own.texts.edge.search(text, key.end())
        if edge is None or edge[0] != own.texts.value_end:
            return None
        edges += [key.end(), edge.start()]
        place = edge.end()
    tail = own.texts.tail.match(text, place)
    if head is None or tail is None:
        return None
    pieces = [text[one:other] for one, other in itertools.pairwise([*edges, tail.end()])]
    hidden = next(letter for letter in map(chr, range(0xE000, 0xF900)) if letter not in "".join(pieces))
    pieces[1::2] = [value.replace("<", hidden) for value in pieces[1::2]]
    complete = tail.end() < len(text) or tail[0].endswith(own.end) or not text.startswith(own.start, begin)
    return _Part(begin, tail.end(), "".join(pieces), complete=complete, hidden=hidden)


def _end(text: str, own: _Format, place: int, limit: int) -> tuple[int, bool]:
    """Return (where a call ends, whether it has its end mark between ``place`` and ``limit``)."""
    assert own.end is not None
    end = text.find(own.end, place, limit)
    return (limit, limit < len(text)) if end < 0 else (end + len(own.end), True)


def _elements(text: str, start: str, begin: int) -> Iterator[_Part]:
    """Return a part for each call of a list of JSON objects, or of one object, that begins with the mark ``start``."""
    place = begin + len(start)
    limit = _mark_or_end(text, start, place)
    bracket = _BRACKET.match(text, place)
    place = bracket.end() if bracket else place
    while True:
        place = _skip(text, place, limit, " \t\r\n,")
        if place >= limit or text[place] == "]":  # an empty list, or one that ends with a comma
            break
        element, complete = place, True
        if (own_end := _json_end(text, place)) is not None:
            place = own_end
            limit = limit if place <= limit else _mark_or_end(text, start, place)  # the mark is in an argument
        else:
            following = re.compile(r'\{\s*"name"').search(text, place + 1, limit)
            place, complete = (following.start(), True) if following else (limit, limit < len(text))
        body = text[element:place].rstrip().rstrip(",")
        after = _skip(text, place, limit, " \t\r\n")
        ends = bracket is None or after >= limit or text[after] == "]"
        end = min(limit, text.find("]", place, limit) + 1 or limit) if ends and bracket else place
        yield _Part(begin, end, f"{start}[{_escaped(body, start)}]", body, complete)
        begin = end
        if ends:
            return
    yield _Part(begin, min(limit, place + 1), text[begin : place + 1], complete=place < limit)  # no further element


def _mark_or_end(text: str, mark: str, place: int) -> int:
    found = text.find(mark, place)
    return len(text) if found < 0 else found


def _skip(text: str, place: int, limit: int, letters: str) -> int:
    while place < limit and text[place] in letters:
        place += 1
    return place


def _objects(text: str, begin: int) -> Iterator[_Part]:
    """Return the calls in a format without marks, Llama's: JSON objects with "name" and "parameters" or "arguments".

    A turn that begins like a call, with <|python_tag|> or an object whose first key is one of a call, consists of
    calls: what is no valid one up to the next object is malformed. In any other turn valid calls are calls, and all
    else is text.
    """
    place = begin + len(text[begin:]) - len(text[begin:].lstrip())
    tagged = text.startswith(_PYTHON_TAG, place)
    strict = tagged or _CALL_OBJECT.match(text, place) is not None
    place += len(_PYTHON_TAG) if tagged else 0
    if tagged and "{" not in text[place:]:
        yield _Part(place, len(text), text[place:], complete=False)
        return
    tries = 0
    while (brace := (_CALL_OBJECT if strict else _OBJECT).search(text, place)) is not None and tries < _TRIES:
        place = brace.start()
        try:
            made, end = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            if strict:
                following = _CALL_OBJECT.search(text, text.find("}", place) + 1 or len(text))
                end = following.start() if following else len(text)
                yield _Part(place, end, text[place:end], text[place:end], complete=following is not None)
            else:
                end, tries = place + 1, tries + 1
        else:
            if strict or _fault_of_json(text[place:end]) is None:
                end = _skip(text, end, len(text), " ;")
                yield _Part(place, end, json.dumps(made), text[place:end].rstrip(" ;"))
        place = end


# ---- one call


def _json_end(text: str, begin: int) -> int | None:
    """Return where the JSON object that begins at ``begin``, behind white space, ends; None if there is none."""
    brace = _BRACE.match(text, begin)
    try:
        return json.JSONDecoder().raw_decode(text, brace.end() - 1)[1] if brace else None
    except (ValueError, RecursionError):
        return None


def _json_of_gemma(text: str, quote: str) -> str | None:
    """Return the JSON of a call of Gemma 4, call:NAME{key:<|"|>text<|"|>,other:[1,null]}; None for another form."""
    match = _GEMMA_CALL.fullmatch(text)
    pieces = match[2].split(quote) if match else []
    if match is None or any('"' in piece for piece in pieces[::2]):
        return None
    pieces[::2] = [_GEMMA_KEY.sub(lambda key: json.dumps(key[0].strip()), piece) for piece in pieces[::2]]
    pieces[1::2] = map(json.dumps, pieces[1::2])
    return f'{{"name": {json.dumps(match[1])}, "arguments": {"".join(pieces)}}}'


def _escaped(text: str, mark: str) -> str:
    """Return JSON without a mark in its strings, where vLLM's parsers would find it."""
    return text.replace(mark, f"\\u{ord(mark[0]):04x}{mark[1:]}")


def _fault_of_json(text: str) -> str | None:
    """Return what is wrong with {"name": .., "arguments": {..}}; Llama calls the latter parameters. None if nothing."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is no valid JSON ({error})"
    if not isinstance(call, dict):
        return "it is no JSON object"
    if not isinstance(call.get("name"), str) or not call["name"]:
        return 'it has no "name" of a tool'
    key = "parameters" if "parameters" in call else "arguments"
    if key not in call:
        return 'it has no "arguments"'
    return None if isinstance(call[key], dict) else f'its "{key}" are no JSON object'


def _has_too_many_arguments(text: str) -> bool:
    return max(text.count("<parameter="), text.count("<arg_key>")) > _MOST_ARGUMENTS


def _arguments(call: _Call) -> dict[str, Any] | str:
    """Return the arguments of a call, or what is wrong with it."""
    if not call.name:
        return "it has no name of a tool"
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        return f"its arguments are no valid JSON ({error})"
    return arguments if isinstance(arguments, dict) else "its arguments are no JSON object"


def _name_in(text: str) -> str:
    names = (pattern.search(text) for pattern in _NAMES)
    return next((name[1] for name in names if name is not None), MalformedCall.name)


def _id(number: int, place: int) -> str:
    """Return the id of a call: nine letters and digits, as Mistral's template wants, and the same in each run."""
    return f"c{number % 10_000:04d}{place % 10_000:04d}"


# ---- types


def _plain_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's function whose parameters vLLM understands: without references, and with null as a type."""
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping):
        return {**function, "parameters": None}
    return {**function, "parameters": _plain(parameters, parameters)}


def _plain(schema: Any, root: Mapping[str, Any], within: frozenset[str] = frozenset()) -> Any:
    """Return a schema with what its references name; a reference ``within`` what it names allows anything."""
    if isinstance(schema, list):
        return [_plain(one, root, within) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        if reference in within:
            return {}
        if isinstance(target, Mapping):
            others = {key: value for key, value in schema.items() if key != "$ref"}
            return _plain({**target, **others}, root, within | {reference})
    plain = {key: _plain(value, root, within) for key, value in schema.items() if key not in ("$defs", "definitions")}
    if plain.get("nullable") is True and isinstance(plain.get("type"), str):  # as transformers writes Optional
        plain["type"] = [plain["type"], "null"]
    return plain


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = (function.get("parameters") or {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _typed(arguments: dict[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a format of texts with those as values that stayed texts against their schema.

    Templates such as Qwen3-Coder's write lists, booleans and null as Python does: ['a', None], True.
    """
    typed = dict(arguments)
    for name, value in arguments.items():
        types = _types(properties.get(name))
        if isinstance(value, str) and types and "string" not in types:
            try:
                literal = ast.literal_eval(value.strip())
                same = json.loads(json.dumps(literal, allow_nan=False)) == literal
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
            if not same:  # keys that are no texts, tuples
                continue
            if _type_of(literal) in types or (_type_of(literal) == "integer" and "number" in types):
                typed[name] = literal
    return typed


def _types(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        for one in schema[key] if isinstance(schema.get(key), list) else ():
            types |= _types(one)
    return types


def _type_of(value: Any) -> str | None:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else kinds.get(type(value))
