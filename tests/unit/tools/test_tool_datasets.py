"""tools/data on originals in each data set's form, written for this test; what comes out scores with the reward."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from megatron_grpo.data.row_files import read_rows
from megatron_grpo.rewards.builtin.code_tests import code
from megatron_grpo.rewards.builtin.countdown import countdown as countdown_reward
from megatron_grpo.rewards.builtin.math_answer import accuracy
from megatron_grpo.rewards.registry import Sample
from tools.data import code_problems, countdown, deepscaler, math_problems

MATH = {
    "problem": "What is $\\frac{1}{2}+\\frac14$?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": "We get $\\boxed{x}$, no: $\\boxed{\\frac{3}{4}}$.",
}
LIMITS = {"code_sandbox": "auto", "code_timeout": 4.0, "code_memory": 512, "reward_timeout": 30.0}


def run(tool, path, rows, *flags, output="out.jsonl"):
    """The tool's exit code and the rows that it wrote; rows that are strings are lines as they are."""
    source = path / "in.jsonl"
    source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    status = tool.main(["--input", str(source), "--output", str(path / output), *flags])
    return status, [row for _, row in read_rows(path / output)] if (path / output).exists() else None


def question(row):
    (message,) = row["prompt"]
    assert message["role"] == "user"
    return message["content"]


def test_math(tmp_path, capsys):
    status, (row,) = run(math_problems, tmp_path, [MATH])
    assert status == 0 and row["answer"] == "\\frac{3}{4}" and row["data_source"] == "math"
    assert (row["level"], row["type"]) == ("Level 1", "Prealgebra")
    assert question(row) == MATH["problem"] + "\n\nPut the final answer in \\boxed{}."
    assert accuracy(Sample("", "so \\boxed{0.75}", row)) == 1
    out = capsys.readouterr().out
    assert "out.jsonl: 1 rows with prompt, answer, level, type, data_source" in out and "the first: {" in out


def test_math_500_and_the_original_folder(tmp_path):
    with_answer = MATH | {"answer": "3", "subject": "Algebra", "level": 5, "type": None, "solution": "three"}
    _, (row,) = run(math_problems, tmp_path, [with_answer], "--instruction", "")
    assert (row["answer"], row["level"], row["type"], question(row)) == ("3", "5", "Algebra", MATH["problem"])
    for number, kind in enumerate(["algebra", "geometry"]):
        (tmp_path / "MATH" / kind).mkdir(parents=True)
        (tmp_path / "MATH" / kind / "1.json").write_text(
            json.dumps(MATH | {"solution": f"\\boxed{{{number}}}"}, indent=2)
        )
    assert math_problems.main(["--input", str(tmp_path / "MATH"), "--output", str(tmp_path / "folder.parquet")]) == 0
    assert [row["answer"] for _, row in read_rows(tmp_path / "folder.parquet")] == ["0", "1"]


def test_bad_rows_of_math_are_all_named_or_left_out(tmp_path, capsys):
    rows = [MATH, '{"problem"', MATH | {"solution": "no box"}, {"problem": 3}, MATH | {"answer": "\\frac{1}{"}, "[]"]
    status, written = run(math_problems, tmp_path, rows)
    errors = capsys.readouterr().err.splitlines()
    assert status == 1 and written is None
    assert [line.partition(": ")[0] for line in errors] == [f"{tmp_path / 'in.jsonl'}:{line}" for line in range(2, 7)]
    for line, message in zip(
        errors,
        [
            "not valid JSON",
            "found neither",
            'expected a text in "problem", found 3',
            "its braces do not match",
            "expected a JSON object, found a list",
        ],
        strict=True,
    ):
        assert message in line
    status, written = run(math_problems, tmp_path, rows, "--bad-rows", "skip")
    assert status == 0 and len(written) == 1 and "left out 5 of 6 rows" in capsys.readouterr().out


def test_deepscaler_from_a_list(tmp_path, capsys):
    source = tmp_path / "deepscaler.json"
    rows = [{"problem": "1+1?", "answer": "2", "solution": "so"}, {"problem": "Half?", "answer": 0.5, "solution": ""}]
    source.write_text(json.dumps(rows, indent=1))
    arguments = ["--input", str(source), "--output", str(tmp_path / "a.parquet")]
    assert deepscaler.main(arguments) == 0
    written = [row for _, row in read_rows(tmp_path / "a.parquet")]
    assert [row["answer"] for row in written] == ["2", "0.5"] and written[0]["data_source"] == "deepscaler"
    assert accuracy(Sample("", "\\boxed{\\frac12}", written[1])) == 1
    source.write_text(json.dumps([rows[0], 5, {"problem": "?"}, {"problem": "?", "answer": True}]))
    capsys.readouterr()
    assert deepscaler.main(arguments) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in errors] == [f"{source}, entry {number}" for number in (2, 3, 4)]
    source.write_text("[1")
    assert deepscaler.main(arguments) == 1
    assert f"{source}: not valid JSON" in capsys.readouterr().err


def test_countdown_converts(tmp_path, capsys):
    table = pyarrow.Table.from_pylist([{"target": 98, "nums": [44, 19, 35]}, {"target": 24, "nums": [3, 3, 8, 8]}])
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    output = str(tmp_path / "o.jsonl")
    assert countdown.main(["--input", str(tmp_path / "in.parquet"), "--output", output]) == 0
    first, second = (row for _, row in read_rows(tmp_path / "o.jsonl"))
    assert "44, 19, 35, each exactly once" in question(first) and "equals 98" in question(first)
    assert countdown_reward(Sample("", "<answer>44 + 19 + 35</answer>", first)) == 1
    assert countdown_reward(Sample("", "<answer>8 / (3 - 8/3)</answer>", second)) == 1
    bad = [{"target": 7, "nums": [1, 1]}, {"target": "7", "nums": [7]}, {"target": 7, "nums": []}, {"nums": [1]}]
    huge = {"target": 1, "nums": [10**400, 1]}
    status, _ = run(countdown, tmp_path, [*bad, {"target": 1, "nums": [1] * 9}, huge], output="p.jsonl")
    errors = capsys.readouterr().err.splitlines()
    assert status == 1 and len(errors) == 6 and "7 cannot be made of [1, 1]" in errors[0]


def test_countdown_generates_what_can_be_solved(tmp_path, capsys):
    def made(seed, name):
        flags = ["--generate", "30", "--numbers", "2", "3", "--largest", "20", "--seed", seed]
        assert countdown.main([*flags, "--output", str(tmp_path / name)]) == 0
        return [row for _, row in read_rows(tmp_path / name)]

    rows = made("1", "a.jsonl")
    assert rows == made("1", "b.jsonl") != made("2", "c.jsonl")
    assert len({(tuple(sorted(row["nums"])), row["target"]) for row in rows}) == 30
    assert {len(row["nums"]) for row in rows} == {2, 3} and max(max(row["nums"]) for row in rows) <= 20
    assert countdown.main(["--generate", "9", "--numbers", "1", "--output", str(tmp_path / "d.jsonl")]) == 1
    assert "--numbers 2 to 5" in capsys.readouterr().err


APPS = {
    "question": "Print the sum of two numbers.",
    "input_output": json.dumps({"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]}),
    "solutions": json.dumps(["print(0)", "a, b = map(int, input().split())\nprint(a + b)"]),
    "starter_code": "",
}
MBPP = {
    "text": "Write a function to add.",
    "code": "def add(a, b):\r\n  return math.floor(a + b)",
    "test_setup_code": "import math",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
}


def score(row, program):
    return code(Sample("", f"```python\n{program}\n```", row), **LIMITS)


def test_programs_that_read_and_print(tmp_path):
    status, (row,) = run(code_problems, tmp_path, [APPS])
    assert status == 0 and json.loads(row["tests"]) == [
        {"stdin": "1 2\n", "stdout": "3\n"},
        {"stdin": "3 4", "stdout": "7"},
    ]
    assert score(row, "print(sum(map(int, input().split())))") == 1 and score(row, "print(3)") == 0.5
    assert question(row).startswith("Print the sum") and "```python" in question(row)
    _, (row,) = run(code_problems, tmp_path, [APPS], "--max-tests", "1", output="one.jsonl")
    assert len(json.loads(row["tests"])) == 1


@pytest.mark.parametrize(("outputs", "returned"), [([[1, 2], [3, 4]], None), ([[3], [7]], None), ([[[3]], [[7]]], [3])])
def test_functions(tmp_path, outputs, returned):
    """What is returned may be in a list of one: the solution says which."""
    body = {3: "return a + b", 2: "return [a, b]"}[3 if len(outputs[0]) == 1 else 2]
    body = "return [a + b]" if returned else body
    row = APPS | {"starter_code": "def f(a, b):", "solutions": json.dumps([f"def f(a, b):\n    {body}"])}
    row["input_output"] = json.dumps({"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": outputs})
    status, (made,) = run(code_problems, tmp_path, [row])
    expected = {"return a + b": 3, "return [a, b]": [1, 2], "return [a + b]": [3]}[body]
    assert status == 0 and json.loads(made["tests"])[0] == {"call": "f", "args": [1, 2], "returns": expected}
    assert "Begin with:\n\n```python\ndef f(a, b):" in question(made)


def test_methods(tmp_path):
    solution = "class Solution:\n    def f(self, a):\n        return a[::-1]"
    row = {
        "question": "Reverse.",
        "starter_code": "class Solution:\n    def f(self, a):",
        "solutions": json.dumps([solution]),
    }
    row["input_output"] = {"fn_name": "f", "inputs": [["ab"], ["x"]], "outputs": [["ba"], ["x"]]}
    _, (made,) = run(code_problems, tmp_path, [row])
    assert json.loads(made["tests"]) == ["assert Solution().f(*['ab']) == 'ba'", "assert Solution().f(*['x']) == 'x'"]
    assert score(made, solution) == 1


def test_mbpp(tmp_path):
    _, (row,) = run(code_problems, tmp_path, [MBPP | {"code": None}])
    assert json.loads(row["tests"])[0] == "import math\nassert add(1, 2) == 3"
    assert "assert add(1, 2) == 3\nassert add(0, 0) == 0" in question(row)
    assert score(row, "def add(a, b):\n    return math.floor(a + b)") == 1


def test_bad_programming_problems_are_named(tmp_path, capsys):
    bad = [
        APPS | {"input_output": ""},
        APPS | {"input_output": '{"inputs": ["1"], "outputs": []}'},
        APPS | {"input_output": '{"inputs": [1], "outputs": ["1"]}'},
        APPS | {"input_output": '{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}'},
        APPS | {"solutions": '["print(0)"]'},
        APPS | {"question": None},
        MBPP | {"test_list": []},
        MBPP | {"code": "def add(a, b):\n  return 4"},
        MBPP | {"test_setup_code": "", "test_imports": [3]},
    ]
    status, written = run(code_problems, tmp_path, [APPS, *bad])
    errors = capsys.readouterr().err.splitlines()
    assert status == 1 and written is None
    assert [line.partition(": ")[0] for line in errors] == [f"{tmp_path / 'in.jsonl'}:{n}" for n in range(2, 11)]
    assert "none of the first 1 solutions passes all tests" in errors[4] and '"question", found null' in errors[5]
    status, written = run(code_problems, tmp_path, [APPS, bad[4]], "--tries", "0")
    assert status == 0 and len(written) == 2
