"""Tool calls by vLLM's parsers: types of JSON, reasoning, malformed calls, the probe at the start.

What a turn says comes from the published chat templates; what is read must be the arguments that they rendered. The
tests run with vLLM 0.32, and with 0.26 on the PYTHONPATH (its openai_harmony needs TIKTOKEN_ENCODINGS_BASE).
"""

import json
import time
from types import SimpleNamespace

import pytest
from instruct_models import DATA, build_tokenizer

from megatron_grpo.data.end_of_turn import turn_end_token_ids
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.environments import tool_calls
from megatron_grpo.environments.environment import Turn
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.environments.rendering import TurnRenderer
from megatron_grpo.environments.tool_calls import ToolCallParser
from megatron_grpo.environments.tool_probe import ARGUMENTS, NAME, TOOL, probe, rendered_call
from megatron_grpo.rollout.collect import to_batch
from megatron_grpo.rollout.engine import Completion, Request, generate
from megatron_grpo.rollout.episodes import Episodes
from megatron_grpo.utils.errors import GrpoError
from tools.make_tiny_model import make_tokenizer

CODER = DATA.parent / "chat_templates" / "Qwen3-Coder-30B-A3B-Instruct.jinja"
MODELS = {  # with its tokens, the parser of the documentation
    "Qwen3-8B": "hermes",
    "Qwen2.5-7B-Instruct": "hermes",
    "Llama-3.1-8B-Instruct": "llama3_json",
    "Llama-3.2-3B-Instruct": "llama3_json",
    "Mistral-Nemo-Instruct-2407": "mistral",
    "DeepSeek-V3-0324": "deepseek_v3",
    "GLM-4.5-Air": "glm45",
    "GLM-4.7-Flash": "glm47",
    "Kimi-K2-Instruct": "kimi_k2",
    "MiniMax-M2.5": "minimax_m2",
    "Qwen3-Coder-30B-A3B-Instruct": "qwen3_coder",
    "Qwen3-Next-80B-A3B-Instruct": "hermes",
    "Qwen3.5-27B": "qwen3_coder",
    "NVIDIA-Nemotron-3-Nano-30B-A3B": "qwen3_coder",
    "gemma-4-E2B-it": "gemma4",
    "gpt-oss-20b": "openai",
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
# Texts that look like values of other types: the schema has the type string.
TEXTS = [ARGUMENTS | {"text": text} for text in ("57", "true", "[1, 2]", '{"a": 1}', "1e5", '你好\n"quoted"')]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return (tokenizer, renderer) of a published model, each built once."""
    built = {}

    def build(name):
        if name not in built:
            directory = tmp_path_factory.mktemp(name)
            coder = "Coder" in name
            build_tokenizer("Qwen3-8B" if coder else name, directory, real_ids=name == "gpt-oss-20b")
            tokenizer = HuggingFaceTokenizer(directory, CODER.read_text() if coder else None)
            given = {"stop_token_ids": None, "stop_words": None, "ignore_eos": True, "load_hf": None}
            ends = turn_end_token_ids(SimpleNamespace(**given, tokenizer_model=directory), tokenizer)
            built[name] = tokenizer, TurnRenderer(tokenizer, ends)
        return built[name]

    return build


@pytest.fixture(scope="module")
def parser(model):
    """Return a function that makes the parser of a model; the test is skipped where gpt-oss's vocabulary is missing."""

    def make(name, reasoning=None, kind=None):
        try:
            return ToolCallParser(kind or MODELS[name], model(name)[0].backend, reasoning)
        except GrpoError as error:
            if "TIKTOKEN_ENCODINGS_BASE" in str(error):
                pytest.skip(str(error))
            raise

    return make


def read(parser, model, name, arguments, calls=1):
    """Return the calls in a turn that the chat template rendered."""
    tokenizer, renderer = model(name)
    before, text, end = rendered_call(renderer, {}, arguments, calls)
    ids = tokenizer.backend.encode(text + end, add_special_tokens=False)
    said = parser(name).parse(text, [TOOL], ids=ids, before=before, number=3)
    assert not said.malformed and NAME not in said.text
    return said.calls


def as_json(arguments):
    return json.dumps(arguments, sort_keys=True)  # Gemma's template sorts keys


def found(said):
    return [(call.name, call.arguments) for call in said.calls]


@pytest.mark.parametrize("name", MODELS)
def test_all_types_of_json(name, model, parser):
    """The expected arguments are those that the template was given. json.dumps tells True from 1."""
    for arguments in (ARGUMENTS, *TEXTS):
        (call,) = read(parser, model, name, arguments)
        assert call.name == NAME
        assert as_json(call.arguments) == as_json(arguments), f"of the text {arguments['text']!r}"


@pytest.mark.parametrize("name", [n for n in MODELS if not n.startswith(("Llama", "gpt-oss"))])  # one call a turn
def test_two_calls_of_a_turn(name, model, parser):
    calls = read(parser, model, name, ARGUMENTS, calls=2)
    assert [as_json(call.arguments) for call in calls] == [as_json(ARGUMENTS)] * 2
    again = read(parser, model, name, ARGUMENTS, calls=2)
    assert [call.id for call in again] == [call.id for call in calls] and len({call.id for call in calls}) == 2


def test_add_gets_numbers(parser):
    """The calls of the issue: add(a=5, b=7) is 12, not 57."""
    texts = {
        "GLM-4.5-Air": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
        "Qwen3-Coder-30B-A3B-Instruct": "<tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n"
        "<parameter=b>\n7\n</parameter>\n</function>\n</tool_call>",
    }
    for name, text in texts.items():
        said = parser(name).parse(text, [ADD])
        assert found(said) == [("add", {"a": 5, "b": 7})]
        # A row's tools can be functions without the object around them.
        assert found(parser(name).parse(text, [ADD["function"]])) == [("add", {"a": 5, "b": 7})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer", "nullable": True}, "null", None),  # as transformers writes Optional[int]
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),  # as pydantic does
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/Point"}, '{"x": 1, "y": "2"}', {"x": 1, "y": "2"}),
        ({"type": "array", "items": {"$ref": "#/$defs/Point"}}, '[{"x": 1, "y": "2"}]', [{"x": 1, "y": "2"}]),
        ({"type": "array", "items": {"type": "string"}}, '["1", "2"]', ["1", "2"]),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "number"}, "1e-3", 0.001),
        ({"type": "boolean"}, "false", False),
        ({"type": "string", "enum": ["1", "2"]}, "1", "1"),
        ({}, "text", "text"),
    ],
)
def test_types_of_schemas(schema, text, value, parser):
    point = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}}
    parameters = {"type": "object", "properties": {"v": schema}, "$defs": {"Point": point}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    call = f"<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    (made,) = parser("GLM-4.5-Air").parse(call, [tool]).calls
    assert json.dumps(made.arguments) == json.dumps({"v": value})


@pytest.mark.parametrize("name", MODELS)
def test_the_probe_accepts_the_models_own_parser(name, model, parser):
    tokenizer, renderer = model(name)
    probe(parser(name), renderer, tokenizer.backend)


def test_the_probe_refuses_other_parsers(model, parser):
    tokenizer, renderer = model("Qwen3-8B")
    with pytest.raises(GrpoError, match="qwen3_coder does not read the calls that the model's chat template writes"):
        probe(parser("Qwen3-8B", kind="qwen3_coder"), renderer, tokenizer.backend)
    tokenizer, renderer = model("Qwen3-Coder-30B-A3B-Instruct")
    with pytest.raises(GrpoError, match="give the parser of the model's family"):
        probe(parser("Qwen3-Coder-30B-A3B-Instruct", kind="hermes"), renderer, tokenizer.backend)
    for reasoning in ("qwen3", "deepseek_r1"):
        tokenizer, renderer = model("Qwen3-8B")
        probe(parser("Qwen3-8B", reasoning), renderer, tokenizer.backend)


def test_a_template_without_calls_is_not_probed(model):
    tokenizer, renderer = model("gemma-3-1b-it")
    assert rendered_call(renderer, {}) is None
    probe(ToolCallParser("hermes", tokenizer.backend), renderer, tokenizer.backend)


@pytest.mark.parametrize(
    ("name", "reasoning"), [("Qwen3-8B", "qwen3"), ("Qwen3.5-27B", None), ("Llama-3.1-8B-Instruct", None)]
)
def test_rows_with_tools_of_their_own_share_a_vocabulary(name, reasoning, parser, monkeypatch):
    """A copy of the vocabulary takes 15 MiB; the parsers of fewer lists than there are rows are kept."""
    monkeypatch.setattr(tool_calls, "_MOST_READERS", 20)
    parser = parser(name, reasoning)
    for number in range(50):
        parser.check([ADD | {"function": ADD["function"] | {"name": f"add_{number}"}}])
        if reasoning:
            parser.after_reasoning("x", {"number": number})
    readers = [reader._parser for reader in parser._readers.values()]
    assert len(readers) == 20 and "add_49" in list(parser._readers.values())[-1].schemas
    if reasoning:
        assert len(parser._reasoning._made) < 50
        readers += parser._reasoning._made.values()
    assert len({id(reader.model_tokenizer.get_vocab()) for reader in readers}) == 1
    assert len({id(reader.vocab) for reader in readers if hasattr(reader, "vocab")}) == 1
    called = '<tool_call>{"name": "add_0", "arguments": {"a": 1, "b": 2}}</tool_call>'
    if MODELS[name] == "hermes":  # of a list that was left out
        tools = [ADD | {"function": ADD["function"] | {"name": "add_0"}}]
        assert [call.arguments for call in parser.parse(called, tools).calls] == [{"a": 1, "b": 2}]


def test_unknown_names_list_the_known_ones(model):
    backend = model("Qwen3-8B")[0].backend
    with pytest.raises(GrpoError, match=r"--tool-call-parser nonsense: .*glm45, .*hermes, .*openai"):
        ToolCallParser("nonsense", backend)
    with pytest.raises(GrpoError, match=r"--reasoning-parser nonsense: .*deepseek_r1, .*qwen3"):
        ToolCallParser("hermes", backend, "nonsense")
    with pytest.raises(GrpoError, match="does not fit the tokenizer"):
        ToolCallParser("llama3_json", backend)
    with pytest.raises(GrpoError, match="reads the channels of gpt-oss itself"):
        ToolCallParser("openai", backend, "qwen3")


# ---- reasoning

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 7}}\n</tool_call>'
IN_REASONING = f"<think>I could write {CALL} but no.</think>The answer is 12."
MADE = [("add", {"a": 5, "b": 7})]


@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek_r1"])
def test_calls_in_reasoning_do_not_run(reasoning, parser):
    """qwen3 of vLLM ends reasoning at a call: of a turn with </think> it is not asked."""
    reader = parser("Qwen3-8B", reasoning)
    for text, before in ((IN_REASONING, ""), (IN_REASONING.removeprefix("<think>"), "assistant\n<think>\n")):
        said = reader.parse(text, [ADD], before=before)
        assert not said.calls and not said.malformed and said.text == text
        assert said.reasoning + "The answer is 12." == text
        assert found(reader.parse(text + CALL, [ADD], before=before)) == MADE
    said = reader.parse(f"<think>\n\n</think>\n\n{CALL}", [ADD])
    assert found(said) == MADE and said.text == "<think>\n\n</think>" and said.reasoning == "<think>\n\n</think>"


def test_reasoning_without_an_end(parser):
    """To the end of the turn; with a parser of vLLM, as that has it."""
    text = f"<think>I could write {CALL}"
    for reader, calls in ((parser("Qwen3-8B"), []), (parser("Qwen3-8B", "deepseek_r1"), [])):
        assert found(reader.parse(text, [ADD])) == calls
    assert not parser("Qwen3-8B").parse(CALL, [ADD], before="<think>\n").calls
    # The first mark is missing in the turn and in the prompt.
    assert not parser("Qwen3-8B").parse(IN_REASONING.removeprefix("<think>"), [ADD]).calls
    # enable_thinking=False: the prompt has the reasoning's end.
    thinking = {"enable_thinking": False}
    for reasoning in ("qwen3", "deepseek_r1"):
        reader = parser("Qwen3-8B", reasoning)
        assert found(reader.parse(CALL, [ADD], before="<think>\n\n</think>\n\n", variables=thinking)) == MADE


def test_marks_of_reasoning_in_an_argument(parser):
    call = '<tool_call>{"name": "add", "arguments": {"a": "<think>", "b": "</think>"}}</tool_call>'
    assert found(parser("Qwen3-8B").parse(call, [ADD])) == [("add", {"a": "<think>", "b": "</think>"})]


def test_reasoning_between_calls(parser):
    said = parser("Qwen3-8B").parse(f"{CALL}<think>or {CALL}?</think>{CALL}", [ADD])
    assert found(said) == MADE * 2 and said.reasoning == f"<think>or {CALL}?</think>" == said.text


def test_reasoning_of_other_formats(parser):
    """Of every format with marks, a call in reasoning does not run, and one after it does."""
    for name, text in GOOD.items():
        begin, end = ("<|channel>thought\n", "\n<channel|>") if "gemma" in name else ("<think>", "</think>")
        said = parser(name).parse(f"{begin}maybe {text}{end}", [ADD])
        assert not said.calls and not said.malformed, name
        assert not parser(name).parse(f"maybe {text}", [ADD], before=begin).calls, name  # the prompt opens the thought
        assert found(parser(name).parse(f"{begin}maybe {text}{end}{text}", [ADD])) == MADE, name


# ---- malformed calls

_ARGUMENTS = '{"a": 5, "b": 7}'
_DEEPSEEK = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>"
_KIMI = f"<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>"
_MISTRAL = f'{{"name": "add", "arguments": {_ARGUMENTS}}}'
_LLAMA = f'{{"name": "add", "parameters": {_ARGUMENTS}}}'
_GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n<arg_key>b</arg_key>\n<arg_value>7</arg_value>\n"
    "</tool_call>"
)
_CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\n7\n</parameter>\n</function>\n"
    "</tool_call>"
)
_GEMMA = "<|tool_call>call:add{b:7,a:5}<tool_call|>"
FORMS = {  # model: (before all calls, a call, between calls, after all calls)
    "Qwen3-8B": ("", CALL, "\n", ""),
    "GLM-4.5-Air": ("", _GLM, "\n", ""),
    "Qwen3-Coder-30B-A3B-Instruct": ("", _CODER, "\n", ""),
    "DeepSeek-V3-0324": ("<｜tool▁calls▁begin｜>", _DEEPSEEK, "\n", "<｜tool▁calls▁end｜>"),
    "Kimi-K2-Instruct": ("<|tool_calls_section_begin|>", _KIMI, "", "<|tool_calls_section_end|>"),
    "Mistral-Nemo-Instruct-2407": ("[TOOL_CALLS][", _MISTRAL, ", ", "]"),
    "Llama-3.1-8B-Instruct": ("", _LLAMA, "; ", ""),
    "gemma-4-E2B-it": ("", _GEMMA, "", ""),
}
GOOD = {name: f"{begin}{call}{end}" for name, (begin, call, _, end) in FORMS.items()}
BROKEN = [  # what is replaced in a call, and what is wrong then; formats without the text are left out
    ("7}", "7", "no valid JSON"),  # a missing brace
    ('"arguments": {"a": 5, "b": 7}', '"argument": {"a": 5, "b": 7}', 'no "arguments"'),
    ('"parameters": {"a": 5, "b": 7}', '"parameter": {"a": 5, "b": 7}', 'no "arguments"'),
    (_ARGUMENTS, "[5, 7]", "no JSON object"),
    (_ARGUMENTS, "5 and 7", "no valid JSON"),
    ('"name": "add"', '"name": 7', 'no "name"'),
    ("<tool_call>add\n", "<tool_call>subtract\n", "there is no tool subtract; the tools are add"),
    ("<function=add>", "", "does not have the form"),
    ("```json", "", "does not have the form"),
    ("a:5}", "a:5", "does not have the form"),
    ("a:5}", "a:five}", "does not have the form"),
    ("a:5}", 'a:"5"}', "does not have the form"),
    ("call:add{b:7,a:5}", "call:add", "does not have the form"),
    ("call:add{b:7,a:5}", "call:subtract{b:7,a}", "there is no tool subtract; the tools are add"),
]
CASES = [
    pytest.param(name, *broken, id=f"{name}-{number}")
    for name, (_, call, _, _) in FORMS.items()
    for number, broken in enumerate(BROKEN)
    if broken[0] in call
]


@pytest.mark.parametrize(("name", "old", "new", "fault"), CASES)
def test_a_malformed_call_spoils_no_other(name, old, new, fault, parser):
    begin, call, between, end = FORMS[name]
    broken = call.replace(old, new)
    said = parser(name).parse(begin + between.join([call, broken, call]) + end, [ADD], number=2)
    assert found(said) == MADE * 2
    (bad,) = said.malformed
    assert fault in bad.error and bad.place == 1 and broken.strip() in bad.text and fault in bad.answer["content"]
    assert said.text == "" and new in said.text_with_malformed
    ids = [call["id"] for call in said.message["tool_calls"]]
    assert len(set(ids)) == 3 and ids[1] == bad.id and bad.answer["tool_call_id"] == bad.id
    # Alone, and behind a text.
    said = parser(name).parse("" if name.startswith("Llama") else "I add. " + begin + broken + end, [ADD])
    assert not said.calls and len(said.malformed) == (not name.startswith("Llama"))


@pytest.mark.parametrize("name", FORMS)
def test_a_turn_that_is_cut(name, parser):
    """The last call has no end: text of a cut turn. Without the cut it is a call that its environment answers."""
    begin, call, between, _ = FORMS[name]
    part = call[: call.index("5")]
    said = parser(name).parse(begin + between.join([call, part]), [ADD], cut=True)
    assert found(said) == MADE and not said.malformed and part.strip() in said.text
    said = parser(name).parse(begin + between.join([call, part]), [ADD])
    assert len(said.malformed) + len(said.calls) == 2 and found(said)[0] == MADE[0]


@pytest.mark.parametrize("name", FORMS)
def test_text_around_calls_stays(name, parser):
    begin, call, _, end = FORMS[name]
    said = parser(name).parse(f"I add. {begin}{call}{end} Now wait.", [ADD])
    assert found(said) == MADE and " ".join(said.text.split()) == "I add. Now wait."
    assert parser(name).parse("Nothing to add.", [ADD]).text == "Nothing to add."


@pytest.mark.parametrize(
    ("text", "calls", "malformed"),
    [
        (f"<|python_tag|>{_LLAMA}; {_LLAMA}", 2, 0),
        (f"In the set {{1, 2}} I find {_LLAMA}", 1, 0),
        ('{"answer": 12}', 0, 0),  # does not begin like a call
        ('The row is {"name": "Bob"}.', 0, 0),
        ('{"name": "add"}', 0, 1),
        (_LLAMA[:-1], 0, 1),
        ('{"type": "function", ' + _LLAMA[1:], 1, 0),
        ('<|python_tag|>brave_search.call(query="12")', 0, 1),
    ],
)
def test_the_rule_of_llamas_format(text, calls, malformed, parser):
    said = parser("Llama-3.1-8B-Instruct").parse(text, [ADD])
    assert (len(said.calls), len(said.malformed)) == (calls, malformed)
    assert calls or malformed or said.text == text


@pytest.mark.parametrize("text", ["{", 'x {"a":', 'x {"a', '{"name": "add"', "x {1} "])
def test_long_turns_with_braces_take_no_time(text, parser):
    begun = time.process_time()
    said = parser("Llama-3.1-8B-Instruct").parse(text * (200_000 // len(text)), [ADD])
    assert not said.calls and time.process_time() - begun < 10


def test_sections_and_marks_without_calls(parser):
    for name, text in (
        ("Kimi-K2-Instruct", "<|tool_calls_section_begin|>add<|tool_calls_section_end|>"),
        ("Kimi-K2-Instruct", _KIMI),  # outside of a section
        ("DeepSeek-V3-0324", "<｜tool▁calls▁begin｜>add<｜tool▁calls▁end｜>"),
        ("Mistral-Nemo-Instruct-2407", "[TOOL_CALLS][]"),
        ("Mistral-Nemo-Instruct-2407", "[TOOL_CALLS]"),
        ("Qwen3-8B", "<tool_call></tool_call>"),
    ):
        said = parser(name).parse(text, [ADD])
        assert not said.calls and len(said.malformed) == 1, text


def test_marks_of_calls_in_an_argument(parser):
    call = '<tool_call>{"name": "add", "arguments": {"a": "<tool_call>"}}</tool_call>'
    assert found(parser("Qwen3-8B").parse(call + CALL, [ADD])) == [("add", {"a": "<tool_call>"}), *MADE]
    for text in ("</tool_call>", "\\</tool_call>", "<tool_call>{</tool_call><tool_call>"):
        call = {"name": "add", "arguments": {"a": text}}
        said = parser("Qwen3-8B").parse(f"<tool_call>\n{json.dumps(call)}\n</tool_call>{CALL}", [ADD])
        assert found(said) == [("add", {"a": text}), *MADE] and not said.malformed and said.text == ""


# Arguments as texts have no escapes: what is read must be what was written between the marks.
STRINGS = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
STRINGS["function"]["parameters"]["properties"] = {"a": {"type": "integer"}, "s": {"type": "string"}}


def _coder(*arguments, end="</function>\n</tool_call>"):
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function=f>\n{said}{end}"


def _glm(*arguments, end="</tool_call>"):
    said = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
    return f"<tool_call>f\n{said}{end}"


@pytest.mark.parametrize("name", ["Qwen3-Coder-30B-A3B-Instruct", "GLM-4.5-Air"])
@pytest.mark.parametrize(
    "text", ["x </tool_call> y", "<tool_call>", "</function>", "<think>a</think>", "a < b", "\ue000<"]
)
def test_marks_in_arguments_as_texts(name, text, parser):
    write = _coder if "Coder" in name else _glm
    said = parser(name).parse(write(("a", 1), ("s", text)) + write(("a", 2)), [STRINGS])
    assert found(said) == [("f", {"a": 1, "s": text}), ("f", {"a": 2})]
    assert not said.malformed and said.text == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Qwen3-Coder-30B-A3B-Instruct", "<tool_call><function=f><parameter=s>abc</function></tool_call>"),
        ("Qwen3-Coder-30B-A3B-Instruct", "<function=f><parameter=s>abc</function></tool_call>"),
        ("Qwen3-Coder-30B-A3B-Instruct", _coder(("a", 1), end="<parameter=s>\nabc\n")),  # the turn ends there
        ("Qwen3-Coder-30B-A3B-Instruct", _coder(("a", 1), end="<parameter=s>\nabc\n</function>\n</tool_call>")),
        ("Qwen3-Coder-30B-A3B-Instruct", _coder(("s", "<parameter=a>1</parameter> is a"))),
        ("Qwen3-Coder-30B-A3B-Instruct", _coder(("a", 1), end="</tool_call>")),
        ("GLM-4.5-Air", _glm(end="<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>")),
        ("GLM-4.5-Air", _glm(("a", 1), end="<arg_key>s</arg_key>\n<arg_value>abc\n</tool_call>")),
        ("GLM-4.5-Air", _glm(("a", 1), end="<arg_key>s\n<arg_value>abc</arg_value>\n</tool_call>")),
        ("GLM-4.5-Air", _glm(end="<arg_key>a</arg_key>\n</tool_call>")),
        ("GLM-4.5-Air", _glm(("a", 1), end="<arg_key>s</arg_key>\n<arg_value>abc")),
    ],
)
def test_a_call_that_lacks_arguments_is_not_executed(name, text, parser):
    """vLLM's parsers return the call without the argument that has no end."""
    said = parser(name).parse(text, [STRINGS])
    assert not said.calls and len(said.malformed) == 1
    good = (_coder if "Coder" in name else _glm)(("a", 2))
    said = parser(name).parse(f"{good}\n{text}\n{good}", [STRINGS])
    assert found(said) == [("f", {"a": 2})] * 2 and len(said.malformed) == 1


@pytest.mark.parametrize(
    "form",
    [
        '[TOOL_CALLS][{"name": "f", "arguments": %s}, {"name": "f", "arguments": {"a": 2}}]',
        '[TOOL_CALLS]{"name": "f", "arguments": %s}[TOOL_CALLS]{"name": "f", "arguments": {"a": 2}}',
    ],
)
def test_marks_of_mistral_in_arguments(form, parser):
    for text in ("x [TOOL_CALLS] y", "[TOOL_CALLS][]", '"[TOOL_CALLS]f{', "\\[TOOL_CALLS]"):
        said = parser("Mistral-Nemo-Instruct-2407").parse(form % json.dumps({"s": text}), [STRINGS])
        assert found(said) == [("f", {"s": text}), ("f", {"a": 2})], text
        assert not said.malformed and said.text == ""


@pytest.mark.parametrize(
    "value",
    [
        "<tool_call|>",
        "<|tool_call>call:f{}",
        "<channel|>",
        "}",
        ",a:3,",
        '"',
        "\\n\n",
        "",
        ["<tool_call|>", [{"k y": "a:b"}]],
    ],
)
def test_marks_of_gemma_in_arguments(value, parser):
    nested = '[<|"|><tool_call|><|"|>,[{k y:<|"|>a:b<|"|>}]]'
    written = f'<|"|>{value}<|"|>' if isinstance(value, str) else nested
    text = f"<|tool_call>call:f{{s:{written},a:1}}<tool_call|><|tool_call>call:f{{a:2}}<tool_call|>"
    said = parser("gemma-4-E2B-it").parse(text, [STRINGS])
    assert found(said) == [("f", {"s": value, "a": 1}), ("f", {"a": 2})]
    assert not said.malformed and said.text == ""


def test_a_call_of_qwen3_coder_without_tags(parser):
    call = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    made = ("f", {"a": 1})
    for text, calls in (
        (call, [made]),
        (f"I call it.\n{call}", [made]),
        (f"{call}\n</tool_call>", [made]),
        (f"{call}\n{call}", [made, made]),
        (f"<tool_call>\n{call}\n{call}\n</tool_call>", [made, made]),
        (f"<tool_call>I call it: {call}</tool_call>{call}", [made, made]),
    ):
        said = parser("Qwen3-Coder-30B-A3B-Instruct").parse(text, [STRINGS])
        assert found(said) == calls and not said.malformed, text
        assert said.text == ("I call it." if text.startswith("I") else ""), text
    assert not parser("Qwen3-Coder-30B-A3B-Instruct").parse(f"<think>{call}</think>", [STRINGS]).calls


def test_channels_of_gpt_oss(model, parser):
    """From token ids: analysis is reasoning, whatever is in it."""
    backend = model("gpt-oss-20b")[0].backend
    reader = parser("gpt-oss-20b")

    def parse(text):
        return reader.parse(text, [ADD], ids=backend.encode(text, add_special_tokens=False), number=1)

    call = f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{_ARGUMENTS}<|call|>"
    thought = "<|channel|>analysis<|message|>I could call functions.add.<|end|>"
    said = parse(thought + call)
    assert found(said) == MADE and said.text == "" and said.message["thinking"] == "I could call functions.add."
    said = parse(f"{thought}<|start|>assistant<|channel|>final<|message|>The answer is 12.<|return|>")
    assert not said.calls and said.text == "The answer is 12." and said.reasoning == "I could call functions.add."
    said = parse(thought + call.replace("7}", "7"))
    assert not said.calls and "no valid JSON" in said.malformed[0].error and said.malformed[0].name == "add"
    said = parse(thought + call + call.replace("7}", "7") + call)
    assert found(said) == MADE * 2 and [bad.place for bad in said.malformed] == [1]
    said = parse(f"{thought}<|start|>assistant<|channel|>commentary to=python code<|message|>1+1<|call|>")
    assert not said.calls and len(said.malformed) == 1


# ---- episodes


class Script:
    """An engine that says the given turns, one a step."""

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.running = tokenizer, list(turns), []

    def submit(self, requests):
        self.running += requests

    def poll(self):
        request = self.running.pop(0)
        ids = [*self.tokenizer.encode(self.turns.pop(0)), self.tokenizer.eos_id]
        return [Completion(request.id, ids, [-1.0] * len(ids), "stop", [3] * len(ids)).after(request.begun)]


CALCULATE = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call>'


def test_an_episode_goes_on_after_malformed_calls(tmp_path):
    """Three turns: a good call between two malformed ones; a malformed call; a call in reasoning, then the answer."""
    make_tokenizer("tools").save_pretrained(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    flags = {
        "environment": "calculator", "prompt_key": "prompt", "system_prompt": None, "max_turns": 5,
        "end_token_ids": (tokenizer.eos_id,), "max_prompt_length": 200, "max_environment_tokens": 2000,
        "on_rewritten_history": "keep", "chat_template_kwargs": None, "tool_role": "tool",
    }  # fmt: skip
    broken, nameless = (CALCULATE % "1+1").replace('"}}', '"}'), '<tool_call>{"arguments": {}}</tool_call>'
    last = f"<think>or {CALCULATE % '2+2'}?</think>12"
    turns = [broken + CALCULATE % "5+7" + nameless, broken, last]
    pool = EnvironmentPool(["calculator"], timeout=30, retries=1)
    try:
        parser, renderer = ToolCallParser("hermes", tokenizer.backend), TurnRenderer(tokenizer, (tokenizer.eos_id,))
        engine = Script(tokenizer, turns)
        episodes = Episodes(engine, pool, renderer, parser, tokenizer, SimpleNamespace(**flags))
        row = {"prompt": "5+7="}
        (done,) = generate(episodes, [Request(0, [1, 2], Sampling(2000, log_probs=True), row=row)])
    finally:
        pool.close()
    assert done.finish_reason == "stop" and done.turns == 3 and done.malformed_calls == 3
    roles = [message["role"] for message in done.messages]
    assert roles == ["user", "assistant", "tool", "tool", "tool", "assistant", "tool", "assistant"]
    said = [message["content"] for message in done.messages if message["role"] == "tool"]
    assert "no valid JSON" in said[0] and said[1] == "12" and 'no "name"' in said[2] and "no valid JSON" in said[3]
    assert done.messages[-1]["content"] == last, "rewards see the reasoning and the answer"
    sampled = [token for token, is_sampled in zip(done.token_ids, done.response_mask) if is_sampled]
    spoken = [token for turn in turns for token in (*tokenizer.encode(turn), tokenizer.eos_id)]
    assert sampled == spoken, "all that was sampled is trained on, the malformed calls and the reasoning too"
    assert done.turn_rewards[1] == 0.0 and done.environment_reward == 0.0
    prompt, member = SimpleNamespace(ids=[1, 2], id=0), SimpleNamespace(group=0, place=0, size=1)
    batch = to_batch([prompt], [done], {0: member}, [0], 0)
    assert batch.malformed_calls.tolist() == [3] and batch.turns.tolist() == [3]


def test_a_turn_in_json():
    """What a checkpoint of an earlier version has of a turn is read."""
    from megatron_grpo.environments.worker import _turn

    earlier = {"text": "x", "tool_calls": [], "number": 1, "finish_reason": "stop", "token_ids": [1]}
    assert _turn(earlier) == Turn("x", [], 1, "stop", [1], [])
