"""Convert programming problems with tests to prompt files for GRPO.

    python tools/data/code_problems.py --input train.jsonl --output apps.parquet --bad-rows skip --max-tests 10

The input has one of two formats, as JSON lines or Parquet: "question" with "input_output", JSON text of {"inputs":
[..], "outputs": [..], "fn_name": ..} (APPS, TACO; without fn_name programs read and print), or "text" or "prompt" with
"test_list", asserts in Python (MBPP, with "test_setup_code" or "test_imports"). Rows of the output have "prompt" (chat
messages), "tests" (JSON text for --reward-funcs code) and "data_source". If a row has solutions ("solutions", JSON text
of a list, or "code"), one of the first --tries must pass all tests in the sandbox.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_grpo.data.json_column import json_column
from megatron_grpo.rewards.arguments import SANDBOXES
from megatron_grpo.rewards.builtin.code_tests import code
from megatron_grpo.rewards.registry import Sample
from megatron_grpo.utils.errors import GrpoError
from tools.data.common import chat, convert_files, text

INSTRUCTION = "Write the program in one block of Python, between ```python and ```."


def convert(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Convert a problem to a prompt row; raise GrpoError if it has no tests or no solution passes them."""
    if row.get("test_list") is not None:
        question, forms = text(row, "text", "prompt"), [asserts(row)]
        question += "\n\nIt has to pass these tests:\n\n" + "\n".join(row["test_list"][: args.max_tests])
    else:
        question, forms = text(row, "question", "prompt"), input_output(row)
        starter = row.get("starter_code")
        if isinstance(starter, str) and starter.strip():
            question += f"\n\nBegin with:\n\n```python\n{starter.strip()}\n```"
    solutions = programs(row)[: args.tries]
    prompt = chat(question, INSTRUCTION)
    for tests in forms:
        result = {"prompt": prompt, "tests": json.dumps(tests[: args.max_tests], ensure_ascii=False)}
        result["data_source"] = "code"
        if not solutions:
            run("", result, args)  # raises GrpoError for tests that the reward cannot read
            return result
        if any(run(solution, result, args) == 1 for solution in solutions):
            return result
    raise GrpoError(f"none of the first {len(solutions)} solutions passes all tests")


def asserts(row: dict[str, Any]) -> list[str]:
    """Return the tests of a row in MBPP's format, each after its imports and set-up code."""
    tests = row["test_list"]
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise GrpoError(f'expected texts in "test_list", found {json.dumps(tests, default=str)[:100]}')
    setup = row.get("test_setup_code") or row.get("test_imports") or []
    setup = [setup] if isinstance(setup, str) else setup
    if not isinstance(setup, list) or not all(isinstance(line, str) for line in setup):
        raise GrpoError(f'expected texts in "test_setup_code" and "test_imports", found {setup!r:.100}')
    return ["\n".join([*setup, test]) for test in tests]


def input_output(row: dict[str, Any]) -> list[list[Any]]:
    """Return the possible tests of a row in APPS' format.

    A function's return value may be stored as such or in a list of one element: both interpretations are returned.
    """
    content = json_column(row.get("input_output"))
    inputs, outputs = (content.get(key) if isinstance(content, dict) else None for key in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        found = json.dumps(row.get("input_output"), default=str)[:100]
        raise GrpoError(f'expected {{"inputs": [..], "outputs": [..]}} of one length in "input_output", found {found}')
    pairs, name = list(zip(inputs, outputs, strict=True)), content.get("fn_name")
    if name is None:
        return [[{"stdin": lines(given), "stdout": lines(printed)} for given, printed in pairs]]
    if not isinstance(name, str) or not name.isidentifier() or not all(isinstance(given, list) for given in inputs):
        raise GrpoError(f'"fn_name" {name!r:.60} needs to be a name, and "inputs" a list of lists of arguments')
    bare = [[(given, value) for given, value in pairs]]
    if all(isinstance(value, list) and len(value) == 1 for value in outputs):
        bare.insert(0, [(given, value[0]) for given, value in pairs])
    if "class Solution" in str(row.get("starter_code")):
        return [[f"assert Solution().{name}(*{given!r}) == {value!r}" for given, value in form] for form in bare]
    return [[{"call": name, "args": given, "returns": value} for given, value in form] for form in bare]


def lines(value: Any) -> str:
    """Return the text that a program reads or prints, from a string or a list of lines."""
    if isinstance(value, list):
        value = "\n".join(map(str, value))
    if not isinstance(value, str):
        raise GrpoError(f'expected texts in "inputs" and "outputs" without "fn_name", found {value!r:.60}')
    return value


def programs(row: dict[str, Any]) -> list[str]:
    """Return the solutions of a row."""
    found = json_column(row.get("solutions")) or [row.get("code")]
    return [program for program in found if isinstance(program, str)] if isinstance(found, list) else []


def run(program: str, row: dict[str, Any], args: argparse.Namespace) -> float:
    """Return the reward of a program."""
    sample = Sample("", f"```python\n{program}\n```" if program else "", row)
    limits = {"code_sandbox": args.code_sandbox, "code_timeout": args.code_timeout, "code_memory": args.code_memory}
    return code(sample, reward_timeout=args.code_timeout * 10, **limits)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--max-tests", type=int, metavar="N", help="maximum number of tests of a row; the first are kept [all]"
    )
    parser.add_argument(
        "--tries", type=int, default=3, metavar="N", help="maximum number of solutions of a row to run; 0: none [3]"
    )
    parser.add_argument(
        "--code-sandbox", choices=SANDBOXES, default=SANDBOXES[0], help="sandbox, as in training [strict]"
    )
    parser.add_argument("--code-timeout", type=float, default=4.0, metavar="X", help="time-out of a test, seconds [4]")
    parser.add_argument("--code-memory", type=int, default=512, metavar="N", help="memory limit of a test, MiB [512]")
    return convert_files(__doc__, convert, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
