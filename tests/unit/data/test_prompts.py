"""Prompt files with a tokenizer of one token per character, and properties of the sampler."""

import json
import os
import re
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.data import prompts
from megatron_grpo.data.answer_column import LAST_TURN, find_answers
from megatron_grpo.data.prompts import PromptDataset
from megatron_grpo.data.row_prompt import parse_prompt, parse_tools
from megatron_grpo.data.sampler import PromptSampler
from megatron_grpo.rewards.builtin import code_tests
from megatron_grpo.rewards.registry import Sample, get_rewards, gold_check
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from tools.data import check


class Characters:
    """Token = code point; a conversation is "role:content|" for each message, then ">"."""

    def __init__(self):
        self.special_tokens, self.longest_token, self.text_start = {"<end>": 7}, 1, ""

    def encode(self, text):
        return [ord(c) for c in text]

    def apply_chat_template(self, messages, tools=None, variables=None):
        known = "".join(f"[{tool['name']}]" for tool in tools or [])
        return self.encode(known + "".join(f"{m['role']}:{m['content']}|" for m in messages) + ">")


def flags(**changes):
    return replaced(parse_args([]), **{"max_prompt_length": None} | changes)


def dataset(path, *rows, **changes):
    """A data set of these rows: objects are written as JSON, strings as the lines they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return PromptDataset([path], Characters(), flags(**changes))


def text(prompt):
    return "".join(map(chr, prompt.ids))


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("streamed", [False, True])
def test_the_first_prompts_of_each_file_are_those_that_are_not_skipped(tmp_path, streamed):
    files = {"a": ["1", "bad", "2"], "b": ["3", "4", "5"], "c": ["bad"]}
    for name, texts in files.items():
        rows = [{} if row == "bad" else {"prompt": row} for row in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [tmp_path / f"{name}.jsonl" for name in files]
    data = PromptDataset(paths, Characters(), flags(bad_rows="skip"), streamed=streamed)
    for count, expected in ((None, [["1", "2"], ["3", "4", "5"], []]), (2, [["1", "2"], ["3", "4"], []])):
        assert [[text(prompt) for prompt in prompts] for prompts in data.first_of_files(count)] == expected


def test_plain_and_chat_prompts(tmp_path):
    data = dataset(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "answer": "2", "data_source": "sums"},
        "",
        {"prompt": [user("hi")]},
        {"messages": [{"role": "system", "content": "be brief"}, user("hi")]},
    )
    assert [text(prompt) for prompt in data] == ["1+1=", "user:hi|>", "system:be brief|user:hi|>"]
    assert data[0].ids == [49, 43, 49, 61] and data[0].id == 0
    assert data[0].row == {"prompt": "1+1=", "answer": "2", "data_source": "sums"}
    assert [prompt.source.rpartition(":")[2] for prompt in data] == ["1", "3", "4"]  # the blank line counts


def test_prompt_key(tmp_path):
    assert dataset(tmp_path / "a.jsonl", {"question": "q", "prompt": "p"}, prompt_key="question")[0].ids == [ord("q")]


def test_system_prompt(tmp_path):
    data = dataset(tmp_path / "a.jsonl", {"prompt": "hi"}, {"prompt": [user("you")]}, system_prompt="be brief")
    assert [text(prompt) for prompt in data] == ["system:be brief|user:hi|>", "system:be brief|user:you|>"]


def test_tools_are_given_to_the_chat_template(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": None}}]}
    rows = [
        {"prompt": [user("hi")], "tools": [{"name": "f", "strict": None}, {"name": "g"}]},
        {"prompt": [user("hi")], "tools": json.dumps([{"name": "f"}])},
        {"prompt": [user("hi"), call, {"role": "tool", "content": "3"}], "tools": []},
        {"prompt": [user("hi")], "tools": None},
    ]
    data = dataset(tmp_path / "a.jsonl", *rows)
    expected = ["[f][g]user:hi|>", "[f]user:hi|>", "user:hi|assistant:|tool:3|>", "user:hi|>"]
    assert [text(prompt) for prompt in data] == expected
    # Nulls of JSON are what they are.
    assert parse_tools(rows[0], [user("hi")]) == [{"name": "f", "strict": None}, {"name": "g"}]
    assert parse_tools({"tools": '[{"name": "f", "default": null}]'}, [user("hi")]) == [{"name": "f", "default": None}]


def test_several_files_and_parquet(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    messages = [[user("c")], [user("d"), {"role": "tool", "content": "e", "name": "f"}]]
    table = pyarrow.table({"messages": messages, "answer": [3, 4]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    data = PromptDataset([tmp_path / "a.jsonl", tmp_path / "b.parquet"], Characters(), flags())
    assert [text(prompt) for prompt in data] == ["a", "b", "user:c|>", "user:d|tool:e|>"]
    assert [prompt.id for prompt in data] == [0, 1, 2, 3]
    assert data[3].row["answer"] == 4 and data[3].source == f"{tmp_path / 'b.parquet'}, row 2"


CALLS = [
    {"name": "add", "arguments": {"a": 1, "b": 2}},
    {"name": "find", "arguments": {"text": "x", "limit": {"of": 3}}},
]


def test_parquet_merges_the_shapes_of_rows(tmp_path):
    """Each object gets the keys of all, with null: they are no keys of its own. Columns of others stay as they are."""
    rows = [
        {
            "prompt": [user("c")],
            "tools": [{"name": call["name"], "parameters": dict.fromkeys(call["arguments"], "int")}],
            "tool_calls": [call],
            "extra": {"of": call["arguments"]},
        }
        for call in CALLS
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = PromptDataset([tmp_path / "a.parquet"], Characters(), flags())
    (tool_call,) = get_rewards(["tool_call"])
    for prompt, row, call in zip(data, rows, CALLS, strict=True):
        assert {name: prompt.row[name] for name in ("prompt", "tools", "tool_calls")} == {
            name: row[name] for name in ("prompt", "tools", "tool_calls")
        }
        assert tool_call(Sample("", f"<tool_call>{json.dumps(call)}</tool_call>", prompt.row)) == 1
        assert prompt.row["extra"]["of"].keys() == {"a", "b", "text", "limit"}
    tests = [{"call": "f", "args": [1], "returns": None}, {"stdin": "1", "stdout": "2"}, {"assert": "f(1) is None"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "p", "tests": tests}]), tmp_path / "b.parquet")
    (prompt,) = PromptDataset([tmp_path / "b.parquet"], Characters(), flags())
    assert code_tests._tests(prompt.row["tests"]) == tests


def test_nulls_of_json_lines_stay_in_the_prompt(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [user("x"), assistant | {"name": None}, {"role": "tool", "content": "y"}]
    data = dataset(tmp_path / "a.jsonl", {"prompt": messages, "tool_calls": [{"name": "f", "arguments": {"a": None}}]})
    assert parse_prompt(data[0].row, "prompt") == [user("x"), assistant, {"role": "tool", "content": "y"}]
    assert data[0].row["tool_calls"][0]["arguments"] == {"a": None}


def test_a_prompt_of_json_text_of_messages(tmp_path, capsys):
    said = [{"role": "system", "content": "Be brief."}, user("1 + 1?")]
    data = dataset(tmp_path / "a.jsonl", {"prompt": json.dumps(said)}, {"prompt": "[1, 2]"}, {"prompt": said})
    assert [text(prompt) for prompt in data] == ["system:Be brief.|user:1 + 1?|>", "[1, 2]", text(data[0])]
    line = "1 prompts are JSON text of messages: they are parsed, and rendered as messages"
    assert line in capsys.readouterr().out.splitlines()
    solved = [*said, {"role": "assistant", "content": "2"}]
    row = {"messages": json.dumps(solved)}
    assert parse_prompt(row, "prompt") == said and find_answers(row) == {LAST_TURN: "2"}
    PromptDataset([tmp_path / "a.jsonl"], Characters(), flags(), streamed=True)
    assert "the first row's prompt is JSON text of messages" in capsys.readouterr().out


GOLD = {
    "exact_match": [{"answer": "2"}, {}, {"answer": None}, {"answer": [1, 2]}],
    "accuracy": [{"answer": "\\frac12"}, {"answer": "\\frac{1}{"}, {"answer": ""}],
    "gsm8k": [{"answer": "#### 2"}, {"answer": "none"}],
    "countdown": [{"nums": [1, 2], "target": 3}, {"nums": [1, 2]}],
    "tool_call": [{"tool_calls": []}, {"tool_calls": "{"}],
    "code": [{"tests": ["assert 1"]}, {"tests": [{"stdin": "1"}]}],
}


@pytest.mark.parametrize("name", GOLD)
def test_a_row_without_a_gold_answer_is_a_bad_row(name, tmp_path, capsys):
    args = flags(reward_funcs=[name, "format"], code_sandbox="auto", code_timeout=1.0, code_memory=100)
    rows = [{"prompt": "a"} | row for row in GOLD[name]]
    parts = {"check_gold": gold_check([name, "format"], vars(args))}
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(GrpoError, match=rf'(?s)a\.jsonl:2: reward "{name}": .*--bad-rows skip to skip'):
        PromptDataset([file], Characters(), args, **parts)
    args = replaced(args, bad_rows="skip")
    assert [prompt.row for prompt in PromptDataset([file], Characters(), args, **parts)] == rows[:1]
    data = PromptDataset([file], Characters(), args, streamed=True, **parts)
    assert [prompt.row for prompt in data] == rows[:1]
    capsys.readouterr()
    words = ["--train-data-path", str(file), "--reward-funcs", name, "format"]
    assert check.main(words) == 1
    assert f"1 good rows, {len(rows) - 1} bad" in capsys.readouterr().out
    assert check.main(words[:2]) == 0


def test_check_reads_the_file_of_a_chat_template(tiny_models, tmp_path, capsys):
    rows, template = tmp_path / "a.jsonl", tmp_path / "t.jinja"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}]}) + "\n")
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    words = ["--train-data-path", str(rows), "--tokenizer-model", str(tiny_models["qwen3"])]
    assert check.main([*words, "--chat-template", str(template)]) == 0
    assert "its prompt: '<hi>'" in capsys.readouterr().out


def test_bytes_are_not_compared_with_a_default_in_tokens(tmp_path, capsys):
    """GSM8K has questions of 985 characters, which are 241 tokens."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a" * size}) + "\n" for size in range(981, 987)))
    assert check.main(["--train-data-path", str(file)]) == 0
    assert "bytes of a prompt: 981 to 986" in capsys.readouterr().out
    assert check.main(["--train-data-path", str(file), "--max-prompt-length", "981"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and lines[3].startswith("2 more rows: the prompt has N tokens")


def test_gold_answers_are_those_of_the_rows_route():
    args = flags(reward_funcs=["gsm8k", "exact_match"], reward_routing=["a=gsm8k", "b=exact_match"])
    check_gold = gold_check(args.reward_funcs, vars(args))
    check_gold({"data_source": "b", "answer": "none"})
    with pytest.raises(GrpoError, match='reward "gsm8k": no number'):
        check_gold({"data_source": "a", "answer": "none"})


@pytest.mark.parametrize("checked", [0, 2**30])
def test_the_row_of_a_prompt_in_its_file(tmp_path, monkeypatch, checked):
    """Rows that are left out count, whether they are read at the start or later."""
    monkeypatch.setattr(prompts, "CHECKED_BYTES", checked)
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, texts in zip(files, (["a", "too long", "b"], ["too long", "c", "d"]), strict=True):
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    data = PromptDataset(files, Characters(), flags(max_prompt_length=4, truncation_strategy="delete"))
    assert data.streamed == (checked == 0)
    found = [[(text(prompt), data.row_in_file(prompt)) for prompt in of_file] for of_file in data.first_of_files(9)]
    assert found == [[("a", 0), ("b", 2)], [("c", 1), ("d", 2)]]


def test_truncation(tmp_path, capsys):
    rows = [{"prompt": "abcdef"}, {"prompt": "abc"}, {"prompt": "wxyz"}]
    data = dataset(tmp_path / "a.jsonl", *rows, max_prompt_length=4, truncation_strategy="left")
    assert [text(prompt) for prompt in data] == ["cdef", "abc", "wxyz"]
    data = dataset(tmp_path / "a.jsonl", *rows, max_prompt_length=4, truncation_strategy="delete")
    assert [(prompt.id, text(prompt), prompt.source[-1]) for prompt in data] == [(0, "abc", "2"), (1, "wxyz", "3")]
    assert "left out 1 of 3 prompts" in capsys.readouterr().out
    with pytest.raises(
        GrpoError, match=r"a\.jsonl:1: the prompt has 6 tokens, more than --max-prompt-length 4; .*left"
    ):
        dataset(tmp_path / "a.jsonl", *rows, max_prompt_length=4)
    with pytest.raises(GrpoError, match=r"no prompts left: left out 3 of 3 .*longer than --max-prompt-length 2"):
        dataset(tmp_path / "a.jsonl", *rows, max_prompt_length=2, truncation_strategy="delete")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a"', r"not valid JSON \(.*expected one object per line"),
        ('["a"]', "expected a JSON object, found a list"),
        ("3", "expected a JSON object, found a number"),
        (
            {"question": "a", "answer": "b"},
            r'expected a column "prompt" \(--prompt-key\) or "messages", found question',
        ),
        ({}, "found no column"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": 3}, '"prompt" must be a string or a list of messages, found a number'),
        ({"prompt": {"role": "user"}}, "found an object"),
        ({"prompt": " "}, '"prompt" is empty'),
        ({"prompt": []}, "empty list"),
        ({"prompt": "\ud800"}, "surrogates not allowed"),
        ({"prompt": ["a"]}, r'message 1 of "prompt" must be an object with "role" and "content", found a string'),
        ({"messages": [user("a"), {"content": "b"}]}, 'message 2 of "messages" has no "role"'),
        ({"messages": [{"role": "user"}]}, 'has no "content"'),
        ({"messages": [{"role": 1, "content": "a"}]}, '"role" of message 1 of "messages" must be a string'),
        (
            {"messages": [user([{"type": "image"}])]},
            '"content" of message 1 of "messages" must be a string, found a list',
        ),
        ({"messages": [user("")]}, "is empty"),
        (
            {"prompt": [user("a"), {"role": "assistant", "content": "b"}]},
            "ends with an assistant message.*leave it out",
        ),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "has only an assistant message"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    with pytest.raises(GrpoError, match=rf"a\.jsonl:2: .*{message}"):
        dataset(tmp_path / "a.jsonl", {"prompt": "fine"}, row)


def test_system_prompt_twice(tmp_path):
    with pytest.raises(GrpoError, match="has a system message, and --system-prompt is given"):
        dataset(tmp_path / "a.jsonl", {"prompt": [{"role": "system", "content": "a"}, user("b")]}, system_prompt="c")


def test_bad_files(tmp_path):
    with pytest.raises(GrpoError, match="no such file"):
        PromptDataset([tmp_path / "absent.jsonl"], Characters(), flags())
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(GrpoError, match=r"pipe.jsonl: not a file of a disk"):
        PromptDataset([tmp_path / "pipe.jsonl"], Characters(), flags())
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(GrpoError, match=r"link.jsonl \(a link to gone.jsonl\): no such file"):
        PromptDataset([tmp_path / "link.jsonl"], Characters(), flags())
    with pytest.raises(GrpoError, match=r"reads no \.csv: python tools/data/own_rows.py --input \S+a\.csv "):
        PromptDataset([tmp_path / "a.csv"], Characters(), flags())
    command = (
        f"--input '{tmp_path}/held out.csv' --prompt-column NAME --answer-column NAME --output '{tmp_path}/held out.p"
    )
    with pytest.raises(GrpoError, match=re.escape(command)):
        PromptDataset([tmp_path / "held out.csv"], Characters(), flags())
    (tmp_path / "a.txt").write_text("1")
    with pytest.raises(GrpoError, match=r"not from \.txt"):
        PromptDataset([tmp_path / "a.txt"], Characters(), flags())
    with pytest.raises(GrpoError, match="has no rows"):
        dataset(tmp_path / "a.jsonl")
    (tmp_path / "a.parquet").write_text("not Parquet")
    with pytest.raises(GrpoError, match="not a readable Parquet file"):
        PromptDataset([tmp_path / "a.parquet"], Characters(), flags())
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(GrpoError, match=r"b\.jsonl:1: not valid JSON"):
        PromptDataset([tmp_path / "b.jsonl"], Characters(), flags())


sizes = st.integers(1, 30)
seeds = st.integers(0, 2**32)


@given(sizes, seeds, st.booleans(), st.lists(st.integers(0, 40), max_size=12))
def test_every_prompt_once_per_epoch(size, seed, shuffle, requests):
    sampler = PromptSampler(size, seed, shuffle)
    parts = [sampler.next(n) for n in requests]
    assert [len(part) for part in parts] == requests
    numbers = [number for part in parts for number in part]
    for start in range(0, len(numbers), size):
        epoch = numbers[start : start + size]
        assert max(Counter(epoch).values()) == 1
        assert len(epoch) < size or sorted(epoch) == list(range(size))
        assert shuffle or epoch == list(range(len(epoch)))
    assert (sampler.epoch, sampler.position) == divmod(len(numbers), size)


@given(sizes, seeds, st.integers(0, 100), st.integers(0, 100))
def test_resumed_anywhere_it_gives_the_rest(size, seed, before, after):
    sampler = PromptSampler(size, seed)
    sampler.next(before)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = PromptSampler(size, seed)
    resumed.load_state_dict(state)
    assert resumed.next(after) == sampler.next(after)
    assert resumed.state_dict() == sampler.state_dict()


def test_a_position_from_before_the_curriculum_is_one_without():
    old = {"num_prompts": 9, "seed": 5, "shuffle": True, "epoch": 1, "position": 4}
    fresh, resumed = PromptSampler(9, 5), PromptSampler(9, 5)
    fresh.next(13)
    resumed.load_state_dict(old)
    assert resumed.next(20) == fresh.next(20) and resumed.consumed == 33
    with pytest.raises(GrpoError, match="--curriculum was False and is now True"):
        PromptSampler(9, 5, True, np.ones(9)).load_state_dict(old)


@given(seeds, sizes, st.integers(1, 10))
def test_the_order_does_not_depend_on_the_portions(seed, size, portion):
    whole, parts = PromptSampler(size, seed), PromptSampler(size, seed)
    assert whole.next(5 * portion) == [number for _ in range(5) for number in parts.next(portion)]


def test_seeds_and_epochs_give_different_orders():
    orders = [tuple(PromptSampler(50, seed).next(50)) for seed in range(20)]
    sampler = PromptSampler(50, 0)
    orders += [tuple(sampler.next(50)) for _ in range(20)][1:]
    assert len(set(orders)) == 39


@pytest.mark.parametrize(("changed", "message"), [((9, 1, True), "8 and is now 9"), ((8, 2, True), "1 and is now 2")])
def test_another_order_is_refused(changed, message):
    sampler = PromptSampler(*changed)
    with pytest.raises(GrpoError, match=message):
        sampler.load_state_dict(PromptSampler(8, 1).state_dict())


def test_another_shuffle_is_refused():
    with pytest.raises(GrpoError, match="--no-shuffle"):
        PromptSampler(8, 1, shuffle=False).load_state_dict(PromptSampler(8, 1).state_dict())


@pytest.mark.parametrize("column", ["image", "images", "video", "videos", "audio", "audios"])
def test_images_are_refused_by_file_and_line(tmp_path, column):
    rows = [{"prompt": "a", column: None}, {"prompt": "b", column: []}, {"prompt": "c", column: ["x.png"]}]
    with pytest.raises(GrpoError, match=rf'a\.jsonl:3: "{column}" is not empty, but only text is supported'):
        dataset(tmp_path / "a.jsonl", *rows)
    assert len(dataset(tmp_path / "a.jsonl", *rows[:2])) == 2


@pytest.mark.parametrize("line", ["\f", "\v", " \f\v\t", "\r"])
def test_lines_of_other_white_space_are_blank(tmp_path, line):
    data = dataset(
        tmp_path / "a.jsonl", '{"prompt": "a"}', line, '{"prompt": "b"}', line, line, '{"prompt": "c"}', line
    )
    assert [text(prompt) for prompt in data] == ["a", "b", "c"]
    assert [prompt.source.rpartition(":")[2] for prompt in data] == ["1", "3", "6"]


class Slow(Characters):
    """A tokenizer with tokens of up to 4 characters that must not be given a long text."""

    def __init__(self):
        super().__init__()
        self.longest_token = 4

    def encode(self, text):
        assert len(text) <= 100_000
        return super().encode(text)[::4]


@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_a_prompt_of_10_mb_is_refused_without_being_encoded(tmp_path, key):
    long, file = "x" * 10_000_000, tmp_path / "a.jsonl"
    value = long if key == "prompt" else [user(long)]
    file.write_text(json.dumps({"prompt": "y" * 64}) + "\n" + json.dumps({key: value}) + "\n")
    with pytest.raises(
        GrpoError, match=r"a\.jsonl:2: the prompt has 10000000 characters, and a token at most 4: more th"
    ):
        PromptDataset([file], Slow(), flags(max_prompt_length=16))
    data = PromptDataset([file], Slow(), flags(max_prompt_length=16, truncation_strategy="delete"))
    assert len(data) == 1 and "left out 1 of 2 prompts that are longer" in data.summary()[0]
