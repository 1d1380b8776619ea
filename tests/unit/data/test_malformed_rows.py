"""A thousand malformed rows, drawn from a seed: each is named by file and line, or left out and counted."""

import json
import random
import re
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
from test_prompts import Characters

from megatron_grpo.data import prompts
from megatron_grpo.data.prompts import LeftOut, PromptDataset, draw
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.errors import GrpoError
from tools.data import check

COUNT = 1000
GOOD = {"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": "2", "pass_rate": 0.5}
FLAGS = "--max-prompt-length 64 --min-pass-rate 0.01 --max-completion-length 16 --reward-routing a=exact_match"
FLAGS += " --reward-funcs exact_match"
WRONG = [None, True, 3, -1.5, 1e400, float("nan"), 10**400, {}, [], [[]], [[[{}]]], "", " \t", {"a": {"b": [None]}}]


def text(**changes):
    return json.dumps(GOOD | {"data_source": "a"} | changes)


def without(name):
    row = json.loads(text())
    del row[name]
    return json.dumps(row)


def message(random, **changes):
    good = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    return text(prompt=random.choice([[], good]) + [{"role": "user", "content": "and?"} | changes])


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


# What is wrong, and a maker of such a line: text, or bytes.
BAD = {
    "cut": lambda r: text()[: r.randrange(1, len(text()))],
    "a tail": lambda r: text() + r.choice(["}", ",", "]", "x", text(), "\x00"]),
    "not JSON": lambda r: r.choice(
        ["prompt: 1", "<xml/>", "{'prompt': '1'}", "{prompt: 1}", "\\", '"', "{,}", "[1,", "tru"]
    ),
    "no object": lambda r: r.choice(
        ["3", "null", "true", '"text"', "[]", "[{}]", "NaN", "-Infinity", text().join("[]")]
    ),
    "endless": lambda r: r.choice(["[", '{"a":', "[[{"]) * r.randrange(2000, 60_000),
    "nested without need": lambda r: text(x=nested(r.choice([210, 500, 900]))),
    "a number without end": lambda r: text(answer=0).replace("0", "1" * 5000, 1),
    "not UTF-8": lambda r: text().encode()[:30] + bytes([r.randrange(0x80, 0xC0)]) + text().encode()[30:],
    "UTF-16": lambda r: text().encode("utf-16").replace(b"\n", b"") or b"\xff",
    "binary": lambda r: r.choice([b"\x93NUMPY", b"PK\x03\x04", b"\x00"]) + r.randbytes(40).replace(b"\n", b"\x01"),
    "control characters": lambda r: text().replace("user", f"us{chr(r.randrange(1, 9))}er"),
    "half a surrogate pair": lambda r: text(answer=r.choice(["\ud800", "\udfff", "a\udc00b"])),
    "a key twice": lambda r: text()[:-1] + ', "prompt": "1"}',
    "no prompt": lambda r: r.choice([without("prompt"), text(prompt=None), "{}"]),
    "a prompt of a wrong type": lambda r: text(prompt=r.choice(WRONG)),
    "a message of a wrong type": lambda r: text(prompt=[r.choice([w for w in WRONG if w != {}])]),
    "no role": lambda r: message(r, role=None),
    "a role of a wrong type": lambda r: message(r, role=r.choice(WRONG)),
    "an unknown role": lambda r: message(r, role=r.choice(["User", "human", "gpt", "bot", "systemm"])),
    "no content": lambda r: message(r, content=None),
    "a content of a wrong type": lambda r: message(r, content=r.choice(WRONG)),
    "nothing to answer": lambda r: text(prompt=[*GOOD["prompt"], {"role": "assistant", "content": "2"}]),
    "tools of a wrong type": lambda r: text(
        tools=r.choice(["", "{", "[" * 9999, 3, True, {"name": "f"}, ["f"], [{}], [None], "[3]"])
    ),
    "tools of a text": lambda r: text(prompt="1", tools=[{"name": "f"}]),
    "too long": lambda r: text(prompt="x" * r.randrange(65, 9999)),
    "no pass rate": lambda r: r.choice([without("pass_rate"), text(pass_rate=None)]),
    "a pass rate of a wrong type": lambda r: text(pass_rate=r.choice([w for w in WRONG if w is not None])),
    "another source": lambda r: text(data_source=r.choice([None, "A", "b", 3, ["a"], {"a": "a"}])),
    "sampling of a wrong type": lambda r: text(sampling_params=r.choice([3, "fast", ["max_tokens"], True])),
    "sampling that no row may set": lambda r: text(
        sampling_params=r.choice([{"temperature": 1}, {"seed": 1}, {"x": {}}])
    ),
    "a length of its own": lambda r: text(sampling_params={"max_tokens": r.choice([0, -1, 17, 1.5, "3", 10**30, [1]])}),
    "stop words": lambda r: text(sampling_params={"stop": r.choice([[], "", [""], 3, [3], {"a": 1}])}),
    "a constraint": lambda r: text(
        sampling_params={
            "structured_outputs": r.choice(
                [3, {}, {"regex": "("}, {"regex": "a{9" + "9" * 20 + "}"}, {"choice": [1]}, {"json": "{"}, {"a": 1}]
            )
        }
    ),
}


@pytest.fixture(scope="module")
def malformed(tmp_path_factory):
    """The file, {line: what is wrong}, and how many good lines are between; with blank ones, and a BOM in front."""
    draw = random.Random(7)
    kinds = [*BAD, *draw.choices(list(BAD), k=COUNT - len(BAD))]
    draw.shuffle(kinds)
    lines, wrong = [b"\xef\xbb\xbf" + text().encode()], {}
    for kind in kinds:
        lines += draw.choice([[], [text().encode()], [b"", text().encode()], [b" \t"]])
        line = BAD[kind](draw)
        lines.append(line if isinstance(line, bytes) else line.encode())
        wrong[len(lines)] = kind
    path = tmp_path_factory.mktemp("malformed") / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path, wrong, sum(line == text().encode() for line in lines) + 1


def test_each_is_named_with_file_and_line(malformed):
    path, wrong, good = malformed
    data = PromptDataset([path], Characters(), parse_args(FLAGS.split()), streamed=True)
    found, kinds = {}, {}
    for number in range(len(data)):
        try:
            assert data.read(number).row == json.loads(text())
        except LeftOut as left:
            place, _, what = str(left).partition(": ")
            line = int(place.removeprefix(f"{path}:"))
            found[line], kinds[wrong[line]] = what, what
            assert left.reason == "bad" and 10 < len(what) < 700, what
    assert found.keys() == wrong.keys() and len(found) == COUNT and kinds.keys() == BAD.keys()
    assert len(data) == COUNT + good


def test_they_end_a_run_with_one_message(malformed):
    path, wrong, _ = malformed
    with pytest.raises(GrpoError) as raised:
        PromptDataset([path], Characters(), parse_args(FLAGS.split()))
    lines = str(raised.value).splitlines()
    assert len(lines) == 4 and lines[3].startswith("and 997 more, which tools/data/check.py lists (give --bad-rows")
    assert [line.partition(": ")[0] for line in lines[:3]] == [f"{path}:{line}" for line in sorted(wrong)[:3]]


def test_one_mistake_in_all_rows_is_not_to_be_skipped(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n' * 5)
    with pytest.raises(GrpoError) as raised:
        PromptDataset([path], Characters(), parse_args(FLAGS.split()))
    *rows, last = str(raised.value).splitlines()
    assert [row.partition(": ")[0] for row in rows] == [f"{path}:{line}" for line in (1, 2, 3)]
    assert last == "all 5 rows are invalid: correct the files, or the flag that is named above"


@pytest.mark.parametrize("limit", [0, 2**30])
def test_or_are_left_out_and_counted_streamed_or_not(malformed, limit, monkeypatch, capsys):
    path, _, good = malformed
    monkeypatch.setattr(prompts, "CHECKED_BYTES", limit)
    data = PromptDataset([path], Characters(), parse_args(f"{FLAGS} --bad-rows skip".split()))
    sampler = data.sampler()
    assert [prompt.row["answer"] for prompt in draw(data, sampler, good)] == ["2"] * good
    said = capsys.readouterr().out
    if limit:
        assert len(data) == good and f"left out 1,000 of {COUNT + good:,} prompts that are invalid" in said
        assert sampler.left_out == 0
    else:
        assert data.streamed and sampler.left_out <= COUNT and sampler.consumed == good
        assert said.count("\nleft out ") == 3 and "so far left out 10 of" in said


def test_the_tool_names_them_all_but_three_of_each_error(malformed, capsys):
    path, wrong, good = malformed
    assert check.main([*FLAGS.split(), "--train-data-path", str(path)]) == 1
    out, err = capsys.readouterr()
    lines = err.splitlines()
    named = [line.partition(": ") for line in lines if line.startswith(f"{path}:")]
    counted = [line.partition(" more rows: ") for line in lines[len(named) :]]
    assert {place for place, _, _ in named} < {f"{path}:{line}" for line in wrong}
    errors = Counter(re.sub(r"\d+", "N", error) for _, _, error in named)  # numbers make no other error
    assert counted and max(errors.values()) == 3 and all(errors[error] == 3 for _, _, error in counted)
    assert len(named) + sum(int(count) for count, _, _ in counted) == COUNT
    assert f"{good:,} good rows, 1,000 bad, 0 too long, 0 outside the pass rates" in out
    assert "bytes of a prompt: 6 to 6, median 6" in out


COLUMNS = {
    "prompt": [1.5, True, b"text", [1], [["a"]], {"role": "user"}, [{"role": "user"}], [{"role": 1, "content": "a"}]],
    "messages": [[], [None], [{"content": "a"}], "", [{"role": "user", "content": b"a"}]],
    "sampling_params": [1, [1], {"max_tokens": "3"}, {"max_tokens": 1.5}, {"temperature": 1.0}, {"stop": [None]}],
    "tools": [1, "x", [1], {"a": 1}, [[]]],
    "pass_rate": ["0.5", 2, float("nan"), [0.5]],
    "data_source": ["b", 1, ["a"]],
}
PARQUET = [(name, value) for name, values in COLUMNS.items() for value in values]


@pytest.mark.parametrize(("name", "value"), PARQUET, ids=[f"{name} {value}" for name, value in PARQUET])
def test_parquet_columns_of_a_wrong_type_are_named_with_the_row(tmp_path, name, value):
    row = GOOD | {"data_source": "a"} | {name: value}
    if name == "messages":
        del row["prompt"]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({key: [column] * 3 for key, column in row.items()}), path)
    with pytest.raises(GrpoError) as raised:
        PromptDataset([path], Characters(), parse_args(FLAGS.split()))
    lines = str(raised.value).splitlines()
    assert [line.partition(": ")[0] for line in lines[:3]] == [f"{path}, row {row}" for row in (1, 2, 3)]
    assert name in lines[0] or name == "messages"


def test_parquet_text_that_is_not_utf_8_is_named(tmp_path):
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"fine", b"caf\xe9"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": broken}), tmp_path / "a.parquet")
    with pytest.raises(GrpoError, match=r"a\.parquet, row 2: a value cannot be read: 'utf-8' codec"):
        PromptDataset([tmp_path / "a.parquet"], Characters(), parse_args([]))


def test_parquet_files_that_are_cut_or_overwritten_anywhere(tmp_path):
    """Where a file cannot be read it is named; a change that does not touch what is read may pass."""
    whole = tmp_path / "whole.parquet"
    table = pyarrow.Table.from_pylist([GOOD | {"number": number} for number in range(200)])
    pyarrow.parquet.write_table(table, whole, row_group_size=50)
    content, path, draw = whole.read_bytes(), tmp_path / "bad.parquet", random.Random(3)
    named = 0
    for _ in range(150):
        start, length = draw.randrange(len(content)), draw.randrange(1, 60)
        cut = draw.random() < 0.5
        path.write_bytes(
            content[:start] if cut else content[:start] + draw.randbytes(length) + content[start + length :]
        )
        try:
            data = PromptDataset([path], Characters(), parse_args([]))
            assert not cut and len(data) <= 200
        except GrpoError as error:
            assert str(path) in str(error)
            named += 1
    assert named > 100
