"""Process of ``pool.EnvironmentPool``: commands arrive on stdin, reports leave on stdout, both as JSON lines.

The first command is {"plugins", "path", "names", "timeout", "sizes"}; the report is ["ready"]. Later commands:

    ["begin", key, call, name, row, snapshot, turns]   begin an episode: from a snapshot, or by a reset and these turns
    ["step", key, call, turn]                          the policy's next turn
    ["end", key, call]                                 forget the episode
    ["answer"]                                         report ["answers"]: nothing blocks the event loop

Reports: ["reply", key, call, {"messages", "reward", "done", "snapshot"}] for begin and step, in that of begin also
"answers", what the reset and the turns got without a snapshot; or ["failed", key, call, reason, traceback, threads],
where ``threads`` counts those that go on for calls that are over; or ["fatal", message]. Earlier reports are
["began", key, call] when a call begins to run, and ["waits", key, call] when it waits for a thread: its clock stands.

Episodes run side by side: each call in a coroutine, or in a thread if it is no coroutine.
"""

import asyncio
import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_grpo.environments import threads
from megatron_grpo.environments.agent import load
from megatron_grpo.environments.arguments import AGENT
from megatron_grpo.environments.environment import Environment, MalformedCall, Reply, ToolCall, Turn
from megatron_grpo.environments.registry import get_environment
from megatron_grpo.environments.threads import Clock, Sizes, Threads, current_clock
from megatron_grpo.rewards.registry import load_plugins
from megatron_grpo.rewards.worker import Report, as_reward, begin
from megatron_grpo.utils.errors import GrpoError, raised_at
from megatron_grpo.vision.encoded import as_data_uri, source_of_part
from megatron_grpo.vision.videos import FPS

_MAX_LINE = 2**28  # bytes of a command
_CLEAN_UP = 5.0  # s for a cancelled coroutine


def main() -> None:
    tasks, report = begin()
    setup = json.loads(tasks.readline())
    sys.path[:] = setup["path"]
    threads.sizes = Sizes(**setup["sizes"])
    try:
        load_plugins(setup["plugins"])
        for name in setup["names"]:
            get_environment(name)
            if name.startswith(AGENT):
                load(name.removeprefix(AGENT))
    except GrpoError as error:
        report(["fatal", str(error)])
        return
    report(["ready"])
    asyncio.run(_serve(tasks, report, setup["timeout"]))


async def _serve(tasks, report: Report, timeout: float) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(Threads(threads.sizes.threads))
    reader = asyncio.StreamReader(limit=_MAX_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), tasks)
    episodes, running = _Episodes(report, timeout), set()
    while line := await reader.readline():
        command, *content = json.loads(line)
        if command == "answer":
            report(["answers"])
            continue
        task = asyncio.create_task(episodes.answer(command, *content))
        running.add(task)
        task.add_done_callback(running.discard)


class _NotJson(GrpoError):
    """A snapshot cannot be written."""


class _Episodes:
    """The episodes of this process, by key."""

    def __init__(self, report: Report, timeout: float):
        self._report, self._timeout = report, timeout
        self._episodes: dict[int, Environment] = {}

    async def answer(self, command: str, key: int, call: int, *content: Any) -> None:
        clock = Clock(lambda runs: self._report(["began" if runs else "waits", key, call]))
        try:
            if command == "begin":
                self._report(["reply", key, call, await self._begin(key, *content)])
            elif command == "step":
                self._report(["reply", key, call, await self._step(key, content[0])])
            elif key in self._episodes:
                await self._call(self._episodes.pop(key).close)
        # BaseException includes SystemExit and the time-outs of some libraries.
        except BaseException as error:
            clock.close()
            if command == "end":
                return
            if isinstance(error, _NotJson):
                self._report(["fatal", str(error)])
                return
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
            tail = "".join(traceback.format_list(frames))[-1500:]
            reason = f"raised {type(error).__name__}: {error}"[:300] + raised_at(error)
            if isinstance(error, TimeoutError) and str(error) == "":
                reason = f"took longer than {self._timeout:g} s (--environment-timeout)"
            self._report(["failed", key, call, _printable(reason), _printable(tail), Clock.stuck])
        finally:
            clock.close()

    async def _begin(self, key: int, name: str, row: Mapping[str, Any], snapshot: Any, turns: list[Any]) -> dict:
        _clock().run()  # the constructor may be the environment's own
        environment = self._episodes[key] = get_environment(name).make()
        if snapshot is not None:
            await self._call(environment.restore, snapshot)  # type: ignore[attr-defined]
            return {"messages": [], "reward": None, "done": False, "snapshot": snapshot, "answers": []}
        first = {"messages": _messages(await self._call(environment.reset, row) or []), "reward": None, "done": False}
        answers = [first] + [await self._answer(environment, turn) for turn in turns]
        return first | {"snapshot": await self._snapshot(environment), "answers": answers}

    async def _step(self, key: int, turn: dict[str, Any]) -> dict[str, Any]:
        environment = self._episodes[key]
        answer = await self._answer(environment, turn)
        return answer | {"snapshot": None if answer["done"] else await self._snapshot(environment)}

    async def _answer(self, environment: Environment, turn: dict[str, Any]) -> dict[str, Any]:
        said = _turn(turn)
        if said.malformed_calls and not said.tool_calls and said.finish_reason != "length":
            reply = Reply(reward=0.0)  # the answers below are all that there is to say
        else:
            reply = await self._call(environment.step, said)
        if reply is None:
            reply = Reply(done=True)
        elif not isinstance(reply, Reply):
            reply = Reply(reply)
        messages = _with_malformed(_messages(reply.messages), said)
        try:
            reward = as_reward(reply.reward)
        except ValueError as fault:
            raise ValueError(f"step returned the reward {fault}") from None
        if not messages and not reply.done:
            raise ValueError("step returned no message and no end of the episode")
        return {"messages": messages, "reward": reward, "done": bool(reply.done)}

    async def _snapshot(self, environment: Environment) -> Any:
        """Return the snapshot of an environment, None if it has none; GrpoError if it is not JSON."""
        if not hasattr(environment, "snapshot"):
            return None
        state = await self._call(environment.snapshot)
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise _NotJson(
                f"snapshot() of the environment {type(environment).__name__} is not JSON ({error}): return texts, "
                "numbers, booleans, None, and lists and dictionaries of these, or leave snapshot() out"
            ) from error
        return state

    async def _call(self, function: Callable, *arguments: Any) -> Any:
        clock = _clock()
        call: asyncio.Future
        if inspect.iscoroutinefunction(function):
            clock.run()
            call = asyncio.ensure_future(function(*arguments))
        else:
            call = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
        try:
            async with clock.limit(self._timeout):
                return await asyncio.shield(call)
        except TimeoutError:
            if isinstance(call, asyncio.Task):
                call.cancel()
                await asyncio.wait([call], timeout=_CLEAN_UP)
            call.add_done_callback(_read_error)
            raise


def _clock() -> Clock:
    clock = current_clock()
    assert clock is not None
    return clock


def _read_error(call: asyncio.Future) -> None:
    """Read the error of a call that is over, so that asyncio does not print it."""
    if not call.cancelled():
        call.exception()


def _turn(turn: dict[str, Any]) -> Turn:
    calls = [ToolCall(**call) for call in turn["tool_calls"]]
    # Turns in checkpoints of earlier versions have no malformed calls.
    malformed = [MalformedCall(**call) for call in turn.get("malformed_calls", ())]
    return Turn(**turn | {"tool_calls": calls, "malformed_calls": malformed})


def _with_malformed(messages: list[dict[str, Any]], turn: Turn) -> list[dict[str, Any]]:
    """Return the messages of an environment with the answers to malformed calls, in the order of the calls.

    They are at the end if the environment's messages are not one for each call.
    """
    answers = [*messages]
    each = [message.get("tool_call_id") for message in messages] == [call.id for call in turn.tool_calls]
    for call in turn.malformed_calls:
        answers.insert(call.place if each else len(answers), _messages([call.answer])[0])
    return answers


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise TypeError(f"returned {messages!r:.80}, not a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(f'returned the message {message!r:.80}, not {{"role": .., "content": ..}}')
        if not isinstance(message.get("content"), str | list):
            raise TypeError(f"returned a message of the role {message['role']} without a text or parts as content")
    return [{**message, "content": _content(message["content"])} for message in messages]


def _content(content: str | list[Any]) -> str | list[dict[str, Any]]:
    """Return a message's content in JSON's types: a text, or its parts with encoded images and videos."""
    if isinstance(content, str):
        return _printable(content)
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": _printable(part["text"])})
        elif kind in ("image", "image_url") and source_of_part(part) is not None:
            parts.append({"type": "image", "image": as_data_uri(source_of_part(part))})
        elif kind == "video":
            parts.append(
                {"type": "video", "frames": [as_data_uri(frame) for frame in _frames(part)], "fps": _fps(part)}
            )
        else:
            raise TypeError(f'returned the part {part!r:.80}, not {{"type": "text", "text": ..}}, an image or a video')
    return parts


def _frames(part: dict[str, Any]) -> Sequence[Any]:
    frames = part.get("frames") if part.get("video") is None else part["video"]
    if not isinstance(frames, list | tuple) or not frames:
        raise TypeError(f'returned the video {part!r:.80}, not {{"type": "video", "video": [its frames], "fps": ..}}')
    return frames


def _fps(part: dict[str, Any]) -> float:
    fps = part.get("fps", FPS)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise TypeError(f"returned a video with the fps {fps!r}, not a number of frames for each second")
    return float(fps)


def _printable(text: str) -> str:
    """Return the text with lone surrogates (of bytes that are not UTF-8) replaced: no tokenizer encodes them."""
    return text.encode("utf-8", "replace").decode()


if __name__ == "__main__":
    main()
