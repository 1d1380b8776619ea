"""The pool of environments with calls that hang, raise, end their process or answer late; tools; the calculator."""

import asyncio
import json

import pytest

from megatron_grpo.environments.builtin.calculator import calculate
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.environments.registry import Reply, ToolCall, Turn, get_environment, tool_schema
from megatron_grpo.environments.tools import ToolEnvironment, ToolError
from megatron_grpo.utils.errors import GrpoError

PLUGIN = """
import os, time
from pathlib import Path
from megatron_grpo.environments.registry import Environment, Reply, register_environment

class Base(Environment):
    def reset(self, row):
        self.steps = 0
        if row.get("bad"):
            raise OSError("no connection")

    def step(self, turn):
        self.steps += 1
        match turn.text.split():
            case ["die"]:
                os._exit(3)
            case ["hang"]:
                time.sleep(1000)
            case ["raise"]:
                raise OSError("lost")
            case ["once", flag] if not Path(flag).exists():
                Path(flag).touch()
                os._exit(1)
            case ["bytes"]:
                return Reply([{"role": "user", "content": "\\udcff" + "x" * 3_000_000}])
            case ["nothing"]:
                return []
            case ["reward", value]:
                return Reply(reward=float(value), done=True)
            case ["end"]:
                return Reply(reward=0.5, done=True)
        return Reply([{"role": "user", "content": f"{os.getpid()} {self.steps}"}], reward=0.25)

register_environment("steps")(Base)

@register_environment("counted")
class Counted(Base):
    def snapshot(self):
        return self.steps

    def restore(self, state):
        self.steps = state + 1000

@register_environment("plain")
class Plain(Base):
    def step(self, turn):
        reply = super().step(turn)
        return Reply([{"role": "user", "content": f"- {self.steps}"}], reply.reward, reply.done)

@register_environment("opaque")
class Opaque(Base):
    def snapshot(self):
        return {1, 2}
"""
NAMES = ["steps", "counted", "plain", "opaque"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    plugin = tmp_path_factory.mktemp("plugin") / "steps.py"
    plugin.write_text(PLUGIN)
    pool = EnvironmentPool(NAMES, [plugin], workers=2, timeout=3.0, retries=1)
    yield pool
    pool.close()


def answers(pool, keys):
    """Wait for one answer of each episode; return them by key."""
    found = {}
    while len(found) < len(keys):
        found |= {answer.key: answer for answer in pool.poll(1.0)}
    assert found.keys() == set(keys)
    return found


def begin(pool, name, keys, row=None):
    for key in keys:
        pool.begin(key, name, row or {})
    assert not any(answer.error for answer in answers(pool, keys).values())


def steps(answer):
    return int(answer.messages[0]["content"].split()[1])


@pytest.mark.slow
def test_a_fault_costs_its_own_episode_only(pool, tmp_path):
    """A process that ends takes other episodes with it: these go on, from their earlier turns, and are not blamed."""
    turns = ["x", "die", "hang", "raise", f"once {tmp_path / 'flag'}", "bytes", "nothing", "x"]
    turns += ["reward 5e307", "reward nan", "reward -3e38"]
    keys = range(len(turns))
    begin(pool, "steps", keys)
    for key in keys:
        pool.step(key, Turn("x"))
    assert [steps(answer) for _, answer in sorted(answers(pool, keys).items())] == [1] * len(turns)
    for key, text in enumerate(turns):
        pool.step(key, Turn(text))
    found = answers(pool, keys)
    assert {key: steps(found[key]) for key in (0, 4, 7)} == {0: 2, 4: 2, 7: 2}
    assert found[0].reward == 0.25 and not found[0].done
    errors = {key: found[key].error for key in (1, 2, 3, 6, 8, 9)}
    assert "ended its process" in errors[1] and "took longer than 3 s" in errors[2]
    assert "raised OSError: lost" in errors[3] and "returned no message" in errors[6]
    assert "step returned the reward 5e+307, beyond float32's range (±3.4e+38)" in errors[8]
    assert "step returned the reward nan, not a finite number" in errors[9] and found[10].reward == -3e38
    assert found[5].messages[0]["content"] == "?" + "x" * 3_000_000
    for key in (0, 4, 5, 7):  # also one whose process has ended while it waited for nothing
        pool.step(key, Turn("end"))
    assert all(answer.done and answer.reward == 0.5 for answer in answers(pool, [0, 4, 5, 7]).values())


def test_a_snapshot_replaces_earlier_turns(pool, tmp_path):
    begin(pool, "counted", [20])
    pool.step(20, Turn("x"))
    assert steps(answers(pool, [20])[20]) == 1
    pool.step(20, Turn(f"once {tmp_path / 'flag'}"))
    assert steps(answers(pool, [20])[20]) == 1002


def through_json(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize(("name", "steps_after"), [("counted", 1003), ("plain", 3)])
def test_an_episode_of_another_pool_goes_on(pool, name, steps_after):
    """A snapshot is restored, or the earlier turns are repeated; the next answer is the newest one."""
    begin(pool, name, [40])
    for number in (1, 2):
        pool.step(40, Turn("x"))
        assert steps(answers(pool, [40])[40]) == number
    answered = through_json(pool.state(40))
    pool.step(40, Turn("x"))
    unanswered = through_json(pool.state(40))
    assert len(answered["answers"]) == len(unanswered["answers"]) == 3 and len(unanswered["turns"]) == 3
    answers(pool, [40])
    pool.resume(41, {}, answered)
    newest = answers(pool, [41])[41]
    assert steps(newest) == 2 and newest.reward == 0.25 and not newest.differs
    pool.step(41, Turn("x"))
    assert steps(answers(pool, [41])[41]) == steps_after
    pool.resume(42, {}, unanswered)
    assert steps(answers(pool, [42])[42]) == steps_after
    pool.step(42, Turn("end"))
    answers(pool, [42])
    pool.resume(43, {}, through_json(pool.state(42)))
    assert answers(pool, [43])[43].done


def test_repeated_turns_that_get_other_answers(pool):
    """The answers of "steps" have the number of their process: another process answers otherwise."""
    begin(pool, "steps", [50])
    pool.step(50, Turn("x"))
    answers(pool, [50])
    state = through_json(pool.state(50))
    pool.resume(51, {}, state | {"answers": [state["answers"][0], {"messages": [], "reward": 0.25, "done": False}]})
    assert answers(pool, [51])[51].differs
    pool.end(51)
    pool.begin(51, "steps", {})
    assert not answers(pool, [51])[51].differs


def test_a_snapshot_that_is_not_json(tmp_path):
    plugin = tmp_path / "opaque.py"
    plugin.write_text(PLUGIN)
    pool = EnvironmentPool(["opaque"], [plugin])
    pool.begin(0, "opaque", {})
    with pytest.raises(GrpoError, match=r"snapshot\(\) of the environment Opaque is not JSON .*set.*: return texts"):
        answers(pool, [0])


def test_a_reset_that_fails(pool):
    pool.begin(30, "steps", {"bad": True})
    assert "raised OSError: no connection" in answers(pool, [30])[30].error


def test_a_plugin_that_cannot_be_loaded(tmp_path):
    plugin = tmp_path / "wrong.py"
    plugin.write_text("1 / 0")
    with pytest.raises(GrpoError, match="line 1: ZeroDivisionError"):
        EnvironmentPool(["steps"], [plugin])


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def fetch(page: str) -> dict:
    """Fetch.

    Args:
        page: the page
    """
    if page == "lost":
        raise ConnectionError("no route")
    return {"page": page}


def test_tools_answer():
    calls = [
        ToolCall("add", {"a": 1}, "i"),
        ToolCall("add", {"c": 1}, "j"),
        ToolCall("add", {"a": "x"}, "k"),
        ToolCall("fetch", {"page": "é"}, "l"),
        ToolCall("sub", {}, "m"),
    ]
    environment = ToolEnvironment([add, fetch])
    reply = asyncio.run(environment.step(Turn("", calls)))
    contents = [message["content"] for message in reply.messages]
    assert contents[0] == "2" and contents[3] == '{"page": "é"}'
    assert contents[1].startswith("error: add: ") and contents[2].startswith("error: ")
    assert contents[4] == "error: there is no tool sub; the tools are add, fetch"
    assert [message["tool_call_id"] for message in reply.messages] == list("ijklm")
    assert asyncio.run(environment.step(Turn("the end"))) == Reply(done=True)
    with pytest.raises(ConnectionError):  # a fault, not a mistake of the policy
        asyncio.run(environment.step(Turn("", [ToolCall("fetch", {"page": "lost"}, "n")])))


def test_schema_of_a_function():
    function = tool_schema(add)["function"]
    assert function["name"] == "add" and function["parameters"]["required"] == ["a"]

    def without(x):
        return x

    with pytest.raises(GrpoError, match="the tool without needs type hints and a docstring"):
        tool_schema(without)


@pytest.mark.parametrize(
    "expression, value",
    [("1234+5678", "6912"), ("(12 + 3) * -4", "-60"), ("7 / 2", "3.5"), ("7 // 2 % 2", "1"), ("10**9", None)]
    + [("__import__('os')", None), ("1/0", None), ("1+", None), ("9" * 2000, None), ("(" * 500, None)],
)
def test_calculator(expression, value):
    if value is None:
        with pytest.raises(ToolError):
            calculate(expression)
    else:
        assert calculate(expression) == value


def test_names():
    assert get_environment("calculator").tools[0]["function"]["name"] == "calculate"
    with pytest.raises(GrpoError, match=r'unknown environment "calculater" \(did you mean "calculator"\?\)'):
        get_environment("calculater")
