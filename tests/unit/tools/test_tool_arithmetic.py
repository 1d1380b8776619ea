import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo.data.row_files import read_rows
from megatron_grpo.utils.errors import GrpoError
from tools.data.arithmetic import SPLITS, make_splits

TOOL = Path(__file__).resolve().parents[3] / "tools" / "data" / "arithmetic.py"


def parts(row):
    """Operands and operation of a row, read from its prompt."""
    left, operation, right = re.fullmatch(r"(\d+)([+*-])(\d+)=", row["prompt"]).groups()
    return int(left), operation, int(right)


def everything(splits):
    return [row for name in SPLITS for row in splits[name]]


@pytest.mark.parametrize("reverse", [False, True])
def test_answers_are_right(reverse):
    for row in everything(make_splits(["+", "-", "*"], [1, 2], reversed_answers=reverse)):
        value = str(eval(row["prompt"].rstrip("=")))
        assert row["answer"] == (value[::-1] if reverse else value)
        assert "-" not in row["answer"]


@pytest.mark.parametrize(
    ("operation", "digits", "count"),
    [("+", [1], 100), ("+", [1, 2], 10_000), ("*", [2], 90 * 90), ("-", [1], 55), ("-", [2], 90 * 91 // 2)],
)
def test_every_problem_is_there_once(operation, digits, count):
    prompts = [row["prompt"] for row in everything(make_splits([operation], digits))]
    assert len(prompts) == len(set(prompts)) == count


def test_digit_counts_are_those_asked_for():
    rows = everything(make_splits(["+", "*"], [3, 1], pairs=2000))
    lengths = {len(str(operand)) for row in rows for operand in (parts(row)[0], parts(row)[2])}
    assert lengths == {1, 3}


def test_no_pair_is_in_two_files_in_either_order():
    splits = make_splits(["+", "-", "*"], [1, 2])
    seen = {}
    for name in SPLITS:
        for row in splits[name]:
            left, operation, right = parts(row)
            assert seen.setdefault((operation, min(left, right), max(left, right)), name) == name


def test_shares_are_kept_and_pairs_limits_the_draw():
    splits = make_splits(["-"], [1, 2, 3], shares=(0.5, 0.3, 0.0, 0.2), pairs=1000)  # one row a pair for subtraction
    assert {name: len(rows) for name, rows in splits.items()} == {"warmup": 500, "train": 300, "valid": 0, "test": 200}


def test_the_seed_decides():
    assert make_splits(["+"], [1, 2], seed=3) == make_splits(["+"], [1, 2], seed=3)
    assert make_splits(["+"], [1, 2], seed=3)["test"] != make_splits(["+"], [1, 2], seed=4)["test"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"digits": [1], "pairs": 56}, "--pairs 56: .* form 55 different pairs"),
        ({"digits": [1], "pairs": 0}, "--pairs 0"),
        ({"digits": [4]}, r"--digits 4 gives 40,504,500 operand pairs .* --pairs N"),
        ({"digits": [0, 1]}, "--digits 0"),
        ({"digits": [1], "shares": (0.5, 0.5, 0.1, 0.1)}, "sum 1"),
        ({"digits": [1], "shares": (1.2, 0.0, 0.0, -0.2)}, ">= 0"),
        ({"digits": [1], "pairs": 5}, "the valid file is empty"),
    ],
)
def test_impossible_requests_are_refused(arguments, message):
    with pytest.raises(GrpoError, match=message):
        make_splits(["+"], **arguments)


def test_both_formats_hold_the_same_rows(tmp_path):
    for suffix in ("jsonl", "parquet"):
        command = [
            sys.executable,
            str(TOOL),
            "--save",
            str(tmp_path),
            "--format",
            suffix,
            "--digits",
            "1",
            "--seed",
            "5",
        ]
        output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
        assert f"train.{suffix}" in output and '"prompt"' in output
    for name, rows in make_splits(["+"], [1], seed=5).items():
        for suffix in ("jsonl", "parquet"):
            assert [row for _, row in read_rows(tmp_path / f"{name}.{suffix}")] == rows


def test_the_tool_says_plainly_what_is_wrong(tmp_path):
    command = [sys.executable, str(TOOL), "--save", str(tmp_path), "--digits", "1", "--pairs", "99"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("arithmetic.py: --pairs 99") and "Traceback" not in result.stderr
