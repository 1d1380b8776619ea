"""Reward for code that passes its tests in a sandbox."""

from typing import Any

from megatron_grpo.data.json_column import json_column
from megatron_grpo.rewards.builtin.answer_text import after_reasoning, last_code_block
from megatron_grpo.rewards.registry import Sample, register_reward
from megatron_grpo.rewards.sandbox.sandbox import Limits, sandbox
from megatron_grpo.utils.errors import GrpoError

_TESTS_SHARE = 0.8  # share of --reward-timeout for the tests; the rest is for the sandbox
_TEST_FORMATS = '"assert ..", {"stdin": .., "stdout": ..} or {"call": NAME, "args": [..], "returns": ..}'


@register_reward("code")
def code(
    sample: Sample,
    *,
    code_sandbox: str,
    code_timeout: float,
    code_memory: int,
    reward_timeout: float,
    unfinished_thinking: str = "wrong",
) -> float:
    """Return the share of row["tests"] that the completion's last block of Python (```python .. ```) passes, else 0.

    The block is looked for after the reasoning (`after_reasoning`).

    row["tests"] is a list, or JSON text of a list. A test has one of three formats:
    - "assert f(1) == 2": Python code to run after the program
    - {"stdin": .., "stdout": ..}: the comparison ignores white space at the ends of lines and of the output
    - {"call": NAME, "args": [..], "returns": ..}: the comparison is of JSON values

    A test that exceeds its time limit fails.
    """
    tests = _tests(sample.row.get("tests"))
    said = after_reasoning(sample, unfinished_thinking)
    program = None if said is None else last_code_block(said)
    if program is None:
        return 0.0
    limits = Limits(code_timeout, _TESTS_SHARE * reward_timeout, code_memory)
    results = sandbox(code_sandbox == "strict").run(program, [_without_expected_result(test) for test in tests], limits)
    return sum(map(passes, tests, results)) / len(tests)


def passes(test: dict[str, Any], result: dict[str, Any]) -> bool:
    """Return whether a result of ``Sandbox.run`` is the expected one of the test."""
    if "stdout" in test:
        return "stdout" in result and _lines(result["stdout"]) == _lines(test["stdout"])
    if "returns" in test:
        return "value" in result and result["value"] == test["returns"]
    return result.get("passed", False)


def _tests(column: Any) -> list[dict[str, Any]]:
    tests = json_column(column)
    if isinstance(tests, list) and tests:
        tests = [{"assert": test} if isinstance(test, str) else _own_keys(test) for test in tests]
        if all(map(_is_test, tests)):
            return tests
    raise GrpoError(f'the row\'s "tests" must be a list of {_TEST_FORMATS}, found {column!r:.200}')


def _own_keys(test: Any) -> Any:
    """Return a test without the null keys of other formats, which Parquet adds; an expected result may be null."""
    if not isinstance(test, dict):
        return test
    expected = {"returns"} if test.get("call") is not None else set()
    return {key: value for key, value in test.items() if value is not None or key in expected}


def _is_test(test: Any) -> bool:
    match test:
        case {"assert": str()} | {"stdin": str(), "stdout": str()} | {"call": str(), "args": list(), "returns": _}:
            return True
    return False


def _without_expected_result(test: dict[str, Any]) -> dict[str, Any]:
    """Return the test without its expected result, which must be hidden from the program."""
    return {key: value for key, value in test.items() if key not in ("stdout", "returns")}


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
