"""tools/data/gsm8k.py on rows in GSM8K's form, written for this test."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet
import pytest
from run_files import json_lines

from megatron_grpo.environments.builtin.calculator import calculate
from megatron_grpo.utils.errors import GrpoError
from tools.data.common import write_rows

TOOL = Path(__file__).resolve().parents[3] / "tools" / "data" / "gsm8k.py"
ROWS = [
    {"question": "Ida has 3 pens and buys 4. How many now? ", "answer": "She has 3+4=<<3+4=7>>7 pens.\n#### 7"},
    {"question": "A ship carries 2 loads of 1,250 t. Total?", "answer": "2*1250=<<2*1250=2500>>2,500\n#### 2,500"},
    {"question": "It was 5 degrees, then 12 less. Now?", "answer": "5-12=<<5-12=-7>>-7\n#### -7"},
]


def tool(*arguments, cwd):
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], cwd=cwd, capture_output=True, text=True)


def test_both_formats(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run = tool("--input", "in.jsonl", "--output", "out/a.parquet", "--output", "out/b.jsonl", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    expected = [
        {"prompt": [{"role": "user", "content": question}], "answer": answer, "data_source": "gsm8k"}
        for question, answer in [
            ("Ida has 3 pens and buys 4. How many now?", "7"),
            ("A ship carries 2 loads of 1,250 t. Total?", "2500"),
            ("It was 5 degrees, then 12 less. Now?", "-7"),
        ]
    ]
    assert pyarrow.parquet.read_table(tmp_path / "out/a.parquet").to_pylist() == expected
    assert json_lines(tmp_path / "out/b.jsonl") == expected
    assert "out/a.parquet: 3 rows" in run.stdout and "Ida has 3 pens" in run.stdout
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a.parquet", "b.jsonl"]


def test_plain_style(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]))
    assert tool("--input", "in.jsonl", "--output", "o.jsonl", "--prompt-style", "plain", cwd=tmp_path).returncode == 0
    row = json.loads((tmp_path / "o.jsonl").read_text())
    assert row["prompt"] == "Question: Ida has 3 pens and buys 4. How many now?\nAnswer:"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q"', "not valid JSON"),
        ('{"question": "q"}', 'expected a text in "answer", found null'),
        ('{"question": 1, "answer": "#### 1"}', 'expected a text in "question", found 1'),
        ('{"question": "q", "answer": "it is 7"}', "must end with"),
        ('{"question": "q", "answer": "#### seven"}', "must end with"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line, message):
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    run = tool("--input", "in.jsonl", "--output", "o.jsonl", cwd=tmp_path)
    assert run.returncode == 1
    assert run.stderr.startswith("in.jsonl:2: ") and message in run.stderr and len(run.stderr.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_bad_outputs(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]))
    assert "must end in .jsonl or .parquet" in tool("--input", "in.jsonl", "--output", "o.csv", cwd=tmp_path).stderr
    assert "no such file" in tool("--input", "absent.jsonl", "--output", "o.jsonl", cwd=tmp_path).stderr


def test_write_rows_in_one_piece(tmp_path):
    path = tmp_path / "a.parquet"
    write_rows([{"a": 1}, {"a": 2, "b": "x"}], path)
    assert pyarrow.parquet.read_table(path).to_pylist() == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]
    with pytest.raises(GrpoError, match="one type"):
        write_rows([{"a": 1}, {"a": "x"}], path)
    with pytest.raises(GrpoError, match="no rows"):
        write_rows([], path)
    assert pyarrow.parquet.read_table(path).num_rows == 2
    assert list(tmp_path.iterdir()) == [path]


def test_examples_stand_before_each_question(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    examples = TOOL.parents[2] / "examples" / "grpo" / "calculator_examples.json"
    run = tool("--input", "in.jsonl", "--output", "o.jsonl", "--examples", examples, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    given = json.loads(examples.read_text())
    assert [row["prompt"][:-1] for row in json_lines(tmp_path / "o.jsonl")] == [given] * 3
    for call, answer in pairwise(given):  # the examples call the tool right
        if answer["role"] == "tool":
            (made,) = call["tool_calls"]
            assert calculate(made["function"]["arguments"]["expression"]) == answer["content"]


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        ("{}", (), "must be a list of messages"),
        ("[", (), "examples.json: "),
        ('[{"role": "user", "content": "1"}]', ("--prompt-style", "plain"), "leave one of them out"),
        ('[{"role": "user", "content": "1"}]', ("--output", "o.parquet"), "give --output as .jsonl"),
    ],
)
def test_examples_that_do_not_fit_are_refused(tmp_path, content, more, said):
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "examples.json").write_text(content)
    run = tool("--input", "in.jsonl", "--output", "o.jsonl", "--examples", "examples.json", *more, cwd=tmp_path)
    assert run.returncode != 0 and said in run.stderr.splitlines()[-1] and not (tmp_path / "o.jsonl").exists()
