"""Time limits of calls that wait for threads and sandboxes: only the time in which a call runs counts."""

import asyncio
import threading
import venv
from collections import defaultdict

import pytest

from megatron_grpo.environments import threads
from megatron_grpo.environments.builtin import python_tool
from megatron_grpo.environments.environment import Environment
from megatron_grpo.environments.libraries.interpreter import Interpreter
from megatron_grpo.environments.registry import register_environment, register_tools
from megatron_grpo.environments.threads import Clock, Sizes, Threads
from megatron_grpo.environments.worker import _Episodes

TIMEOUT = 60.0


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time stands, but for `skip`."""

    now = 0.0

    def time(self):
        return self.now

    async def skip(self, seconds):
        """Let time pass, and all that it makes ready."""
        self.now += seconds
        for _ in range(20):
            await asyncio.sleep(0)


class Steps:
    """Steps of a test: each runs until the test ends it."""

    def __init__(self):
        self.begun, self.ends = [], defaultdict(threading.Event)
        self.changed = threading.Condition()

    def run(self, number):
        with self.changed:
            self.begun.append(number)
            self.changed.notify_all()
        assert self.ends[number].wait(60)
        return number

    async def wait(self, count):
        """Wait until so many steps have begun."""

        def begun():
            with self.changed:
                assert self.changed.wait_for(lambda: len(self.begun) >= count, 60)

        thread = threading.Thread(target=begun)  # no thread of the loop's executor
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the loop hears of it


steps = Steps()


@register_environment("step_in_thread")
class InThread(Environment):
    def step(self, turn):
        return [{"role": "user", "content": str(steps.run(int(turn.text)))}]


def held(number: int) -> str:
    """Wait."""
    return str(steps.run(number))


held.schema = {}
register_tools("held_tools", [held])


class FakeSandbox:
    def __init__(self, kind):
        pass

    def run(self, code, tests, limits):
        return [{"stdout": str(steps.run(int(code)))}]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    global steps
    steps = Steps()
    monkeypatch.setattr(Clock, "stuck", 0)
    yield
    for event in list(steps.ends.values()):
        event.set()


def turn(number, name=None, argument="number"):
    calls = [] if name is None else [{"name": name, "arguments": {argument: number}, "id": "0"}]
    return {"text": str(number), "tool_calls": calls}


def run(body, places=2):
    """Run ``body(loop, episodes, reports)`` in a loop with so many threads."""

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(Threads(places))
        reports = []
        await body(loop, _Episodes(reports.append, TIMEOUT), reports)

    with asyncio.Runner(loop_factory=Loop) as runner:
        try:
            runner.run(main())
        finally:
            for number in range(100):
                steps.ends[number].set()


KINDS = {
    "a step that is no coroutine": ("step_in_thread", lambda n: turn(n)),
    "a tool": ("held_tools", lambda n: turn(n, "held")),
    "the sandbox": ("python", lambda n: turn(str(n), "python", "code")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_wait_for_a_place_do_not_fail(kind, monkeypatch):
    """Eight calls with two places, each of 50 s of a limit of 60 s: the last ones begin after 150 s."""
    name, step = KINDS[kind]
    monkeypatch.setattr(python_tool, "Sandbox", FakeSandbox)
    monkeypatch.setattr(python_tool, "sandbox", lambda strict: type("S", (), {"kind": "limits"}))
    monkeypatch.setattr(threads, "sizes", Sizes(sandboxes=2))
    python_tool._sandboxes.cache_clear()

    async def body(loop, episodes, reports):
        for number in range(8):
            await episodes.answer("begin", number, 1, name, {}, None, [])
        reports.clear()
        calls = [asyncio.create_task(episodes.answer("step", n, 2, step(n))) for n in range(8)]
        for done in range(2, 10, 2):
            await steps.wait(done)
            await loop.skip(50.0)
            running = steps.begun[done - 2 : done]
            assert len(steps.begun) == done
            for number in running:
                steps.ends[number].set()
            await asyncio.wait([calls[number] for number in running], timeout=None)
        replies = [report for report in reports if report[0] not in ("began", "waits")]
        assert sorted(report[1] for report in replies) == list(range(8))
        assert {report[0] for report in replies} == {"reply"}
        for number in range(8):  # the pool hears when a call runs
            mine = [report[0] for report in reports if report[1] == number]
            assert mine[-2:] == ["began", "reply"]

    run(body)
    python_tool._sandboxes.cache_clear()


@pytest.mark.parametrize("kind", ["a step that is no coroutine", "a tool"])
def test_a_call_that_runs_too_long_fails_and_its_thread_is_counted(kind):
    name, step = KINDS[kind]

    async def body(loop, episodes, reports):
        for number in range(2):
            await episodes.answer("begin", number, 1, name, {}, None, [])
        calls = [asyncio.create_task(episodes.answer("step", n, 2, step(n))) for n in range(2)]
        await steps.wait(1)
        (first,) = steps.begun
        await loop.skip(59.0)
        assert not any(call.done() for call in calls)
        await loop.skip(2.0)
        await calls[first]
        assert reports[-1][:4] == ["failed", first, 2, "took longer than 60 s (--environment-timeout)"]
        assert reports[-1][-1] == Clock.stuck == 1
        assert not calls[1 - first].done()
        steps.ends[first].set()
        await steps.wait(2)
        await loop.skip(59.0)
        assert not calls[1 - first].done()
        steps.ends[1 - first].set()
        await calls[1 - first]
        assert reports[-1][0] == "reply"
        while Clock.stuck:
            await asyncio.sleep(0)

    run(body, places=1)


def test_a_coroutine_that_is_not_to_be_cancelled_is_left():
    """It swallows its cancellation and goes on: its call fails, and others go on."""

    class Stubborn(Environment):
        async def step(self, turn):
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    steps.begun.append("cancelled")
                    if len(steps.begun) == 2:  # at the end of the loop
                        raise

    async def body(loop, episodes, reports):
        episodes._episodes[0] = Stubborn()
        call = asyncio.create_task(episodes.answer("step", 0, 1, turn(0)))
        await loop.skip(0.0)
        await loop.skip(61.0)
        assert steps.begun == ["cancelled"]
        await loop.skip(10.0)
        await call
        assert reports[-1][0] == "failed"

    run(body)


def test_an_agent_that_waits_in_its_process_takes_no_time(tmp_path, monkeypatch):
    """--agent-python with one thread: the second program begins when the first one has ended."""
    monkeypatch.setattr(threads, "sizes", Sizes(threads=1))
    venv.create(tmp_path / "venv", symlinks=True)
    (tmp_path / "program.py").write_text(
        "import time\nfrom pathlib import Path\n\n"
        "def run(base_url, row, **metadata):\n"
        "    folder = Path(row['folder'])\n"
        "    (folder / f\"begun {row['number']}\").touch()\n"
        "    while not (folder / 'go').exists():\n        time.sleep(0.01)\n"
        "    return row['number']\n"
    )
    program = Interpreter(str(tmp_path / "venv/bin/python"), f"{tmp_path / 'program.py'}:run")
    reports = defaultdict(list)

    async def call(number):
        clock = Clock(reports[number].append)
        clock.run()
        try:
            return await program.run("http://x", {"number": number, "folder": str(tmp_path)})
        finally:
            clock.close()

    async def calls():
        both = [asyncio.create_task(call(number)) for number in range(2)]
        while not list(tmp_path.glob("begun *")):
            await asyncio.sleep(0.01)
        while [True, False, True] not in reports.values():
            await asyncio.sleep(0.01)
        first = next(number for number in range(2) if reports[number] == [True, False, True])
        assert reports[1 - first] == [True, False] and len(list(tmp_path.glob("begun *"))) == 1
        (tmp_path / "go").touch()
        assert await asyncio.gather(*both) == [0, 1]
        assert reports[1 - first] == [True, False, True]

    asyncio.run(asyncio.wait_for(calls(), 60))
