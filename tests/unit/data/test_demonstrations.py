"""Demonstrations: ids and masks by role against pieces written by hand, and the rows that are refused."""

import json

import pytest
from instruct_models import build_tokenizer
from transformers import AutoTokenizer

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.data.demonstrations import Demonstrations, batch_of
from megatron_grpo.data.end_of_turn import turn_end_token_ids
from megatron_grpo.data.tokenizer import HuggingFaceTokenizer
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.errors import GrpoError

END = "{{ eos_token if m.role == 'assistant' else '\n' }}"
CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
TOOLS = "{% if tools %}tools: {{ tools[0].name }}\n{% endif %}"
PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"
TEMPLATE = f"{TOOLS}{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{CALLS}{END}{{% endfor %}}{PROMPT}"
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "4"},
]
PIECES = [("user: hi\nassistant: ", 0), ("yo<eos>", 1), ("user: 2?\nassistant: ", 0), ("4<eos>", 1)]
WITH_TOOLS = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
]
TOOL_PIECES = [
    ("tools: add\nuser: 1+1\nassistant: ", 0),
    ('<add {"a": 1}><eos>', 1),
    ("tool: 2\nassistant: ", 0),
    ("two<eos>", 1),
]


@pytest.fixture
def read(tiny_models, tmp_path):
    """``read(rows, flags, template)``: the demonstrations of rows in a file, of tokenizers with this chat template."""

    def of(rows, flags="", template=TEMPLATE):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["--max-prompt-length", "40", "--max-completion-length", "40", *flags.split()]
        tokenizer = HuggingFaceTokenizer(tiny_models["qwen3"], template)
        return Demonstrations([file], tokenizer, parse_args(words), end_token_ids=[tokenizer.eos_id])

    return of


@pytest.fixture
def by_hand(tiny_models):
    """``by_hand(pieces)``: ids and mask of pieces of text, encoded one by one by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_models["qwen3"])

    def of(pieces):
        ids = [tokenizer.encode(text, add_special_tokens=False) for text, _ in pieces]
        mask = [own for one, (_, own) in zip(ids, pieces, strict=True) for _ in one]
        return [token for one in ids for token in one], mask

    return of


def text_arguments(messages):
    """The messages with the arguments of tool calls as JSON text, as in OpenAI's protocol."""
    call = {"function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}}
    return [{**message, "tool_calls": [call]} if "tool_calls" in message else message for message in messages]


@pytest.mark.parametrize(
    ("row", "pieces"),
    [
        ({"messages": TURNS}, PIECES),
        ({"messages": json.dumps(TURNS)}, PIECES),  # JSON text
        ({"messages": [*TURNS, {"role": "user", "content": "bye"}]}, PIECES),  # nothing to learn behind the last turn
        ({"messages": WITH_TOOLS, "tools": [{"name": "add"}]}, TOOL_PIECES),
        ({"messages": text_arguments(WITH_TOOLS), "tools": [{"name": "add"}]}, TOOL_PIECES),
        ({"prompt": "1+1=", "answer": 2}, [("1+1=", 0), ("2<eos>", 1)]),
        ({"prompt": TURNS[:1], "answer": "yo"}, PIECES[:2]),
        ({"prompt": TURNS[:3], "solution": "4"}, [(PIECES[0][0] + "yo<eos>" + PIECES[2][0], 0), PIECES[3]]),
    ],
)
def test_ids_and_mask_by_role(row, pieces, read, by_hand):
    (found,) = read([row])
    ids, mask = by_hand(pieces)
    first = mask.index(1)
    assert found.ids == ids[:first] and found.completion == ids[first:] and found.mask == mask[first:]
    batch = batch_of([found], first_row=7)
    assert batch.tokens.tolist() == ids and batch.response_mask.tolist() == mask and batch.row_ids.tolist() == [7]
    assert batch.turns.tolist() == [sum(own for _, own in pieces)]


def test_what_follows_the_end_of_a_turn_is_not_learnt(read, by_hand):
    """The policy never samples the line that templates like Qwen's write behind the end of a turn."""
    (found,) = read([{"messages": TURNS}], template=TEMPLATE.replace("{{ eos_token if", "{{ eos_token + '\n' if"))
    texts = [(PIECES[0][0], 0), ("yo<eos>", 1), ("\n" + PIECES[2][0], 0), ("4<eos>", 1)]
    ids, mask = by_hand(texts)
    assert found.ids + found.completion == ids and [0] * len(found.ids) + found.mask == mask


CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize("thought", ["", "<think></think>\n"])
def test_a_turn_of_glm_ends_with_the_begin_of_the_next_message(thought, tmp_path):
    """The pieces are what GLM-4 and GLM-4.5 sample and read; GLM-4's template shows no calls of tools."""
    build_tokenizer("GLM-4.5-Air" if thought else "GLM-4-9B-0414", tmp_path / "model")
    rows = [{"messages": TURNS}] + [{"messages": [*TURNS[:1], CALLED]}] * bool(thought)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = parse_args(["--tokenizer-model", str(tmp_path / "model"), "--max-completion-length", "400"])
    tokenizer = HuggingFaceTokenizer(tmp_path / "model")
    found, *others = Demonstrations([tmp_path / "rows.jsonl"], tokenizer, args, turn_end_token_ids(args, tokenizer))
    pieces = [("[gMASK]<sop><|user|>\nhi<|assistant|>", 0), (f"\n{thought}yo<|user|>", 1)]
    pieces += [("\n2?<|assistant|>", 0), (f"\n{thought}4<|user|>", 1)]
    parts = [tokenizer.backend.encode(text, add_special_tokens=False) for text, _ in pieces]
    assert found.ids + found.completion == [token for part in parts for token in part]
    mask = [own for part, (_, own) in zip(parts, pieces, strict=True) for _ in part]
    assert [0] * len(found.ids) + found.mask == mask and found.turns == 2
    for calls in others:
        assert tokenizer.decode(calls.completion[-1:], skip_special_tokens=False) == "<|observation|>"
        assert calls.mask == [1] * len(calls.completion)


LONG = {"messages": [{"role": "user", "content": "x" * 60}, *TURNS[1:]]}
STRAY = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '..' }}")


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"messages": TURNS[:1]}, TEMPLATE, "has no message of the assistant"),
        ({"messages": TURNS[1:2]}, TEMPLATE, "begins with an assistant message"),
        ({"messages": "hi"}, TEMPLATE, "must be a list of messages"),
        ({"prompt": "1+1="}, TEMPLATE, 'needs a text as its "answer", found None'),
        ({"answer": "2"}, TEMPLATE, "no prompt: expected a column"),
        ({"messages": TURNS}, STRAY, "renders the conversation up to message 2"),
        ({"messages": TURNS}, TEMPLATE.replace("eos_token", "'!'"), "ends message 2, the assistant's, with none of"),
        (LONG, TEMPLATE, "the demonstration has 103 tokens, more than --max-prompt-length"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, TEMPLATE, '"role" of message 1 of'),
    ],
)
def test_a_bad_row_is_refused_with_its_place(row, template, message, read):
    with pytest.raises(GrpoError, match=r"rows\.jsonl:2: ") as refused:
        read([{"prompt": "1+1=", "answer": "2"}, row], template=template)
    assert message in str(refused.value)


def test_rows_that_are_too_long_or_bad_are_cut_or_left_out(read, by_hand):
    good = {"messages": TURNS}
    assert len(read([good, LONG], "--truncation-strategy delete")) == 1
    assert len(read([good, {"messages": TURNS[:1]}], "--bad-rows skip")) == 1
    ids, mask = by_hand([("user: " + "x" * 60 + "\nassistant: ", 0), *PIECES[1:]])
    (found,) = read([LONG], "--truncation-strategy left")
    assert found.ids + found.completion == ids[-80:] and found.mask == mask[mask.index(1) :]
    answer = {"prompt": "p", "answer": "y" * 90}
    with pytest.raises(GrpoError, match="no prompt is left if it is cut"):
        read([answer], "--truncation-strategy left")


def test_a_file_without_rows_is_refused(read):
    with pytest.raises(GrpoError, match=r"no demonstrations: .*rows\.jsonl has no rows"):
        read([])
