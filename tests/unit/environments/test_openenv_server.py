"""The client of OpenEnv servers against a stand-in that speaks their protocol (openenv 0.10, env_server/types.py)."""

import asyncio
import json

import pytest
from websockets.asyncio.server import serve

from megatron_grpo.environments.builtin.openenv_server import OpenEnv, openenv_tools
from megatron_grpo.environments.registry import Reply, ToolCall, Turn
from megatron_grpo.utils.errors import GrpoError

ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}


def seen(observation: dict, reward=None, done=False) -> dict:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def wrong(code: str, **more) -> dict:
    return {"type": "error", "data": {"message": "it is wrong", "code": code, **more}}


def answer(kind: str, data: dict) -> dict | None:
    """A game of guesses, with one tool; None ends the connection."""
    if kind == "reset":
        return seen({"metadata": {"a": 1}, "said": f"seed {data.get('seed')}", "left": 3})
    if data.get("type") == "list_tools":
        return seen({"tools": [ADD], "metadata": {}})
    if data.get("type") == "call_tool":
        if data["tool_name"] != "add":
            return seen({"tool_name": data["tool_name"], "result": None, "error": {"message": "no such tool"}})
        total = sum(data["arguments"].values())
        return seen({"tool_name": "add", "result": {"data": total, "content": []}, "error": None}, 0.5, total > 9)
    if "guess" not in data:
        return wrong("VALIDATION_ERROR", errors=[{"loc": ["guess"], "msg": "Field required"}])
    return {
        "right": seen({"a": "yes", "b": "well done", "metadata": {}}, 1.0, True),
        "break": wrong("EXECUTION_ERROR"),
        "leave": None,
    }.get(data["guess"], seen({"said": "no"}, 0.0))


@pytest.fixture
def play():
    """`play(coroutine function, room)`: run it with the URL of a server that has room for so many episodes."""

    async def run(function, room):
        open_now = 0

        async def session(socket):
            nonlocal open_now
            open_now += 1
            try:
                if open_now > room:
                    await socket.send(json.dumps(wrong("CAPACITY_REACHED")))
                    return
                assert socket.request.path == "/ws"
                async for line in socket:
                    message = json.loads(line)
                    reply = answer(message["type"], message["data"])
                    if reply is None:
                        return
                    await socket.send(json.dumps(reply))
            finally:
                open_now -= 1

        async with serve(session, "127.0.0.1", 0) as server:
            return await function(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")

    return lambda function, room=9: asyncio.run(run(function, room))


def environment(address: str, **attributes) -> OpenEnv:
    return type("Game", (OpenEnv,), {"url": address, **attributes})()


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_a_field_gets_the_text(play):
    async def episode(url):
        game = environment(url, field="guess")
        assert await game.reset({"seed": 7, "other": 1}) == user("seed 7")
        assert await game.step(Turn("up")) == Reply(user("no"), 0.0, False)
        assert await game.step(Turn("right")) == Reply(user('{"a": "yes", "b": "well done"}'), 1.0, True)
        await game.close()

    play(episode)


def test_an_action_as_json(play):
    """Mistakes are answers, which the policy reads."""

    async def episode(url):
        game = environment(url)
        assert await game.reset({}) == user("seed None")
        assert (await game.step(Turn("right"))).messages[0]["content"].startswith("error: Expecting value")
        assert await game.step(Turn("[1]")) == Reply(user("error: the action must be a JSON object"))
        assert await game.step(Turn('{"gues": "right"}')) == Reply(user("error: guess: Field required"))
        assert (await game.step(Turn('{"guess": "right"}'))).done
        await game.close()

    play(episode)


def test_tools(play):
    async def episode(url):
        tools = await asyncio.to_thread(openenv_tools, url)
        assert tools == [
            {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
        ]
        game = environment(url, tools=tools)
        await game.reset({})
        calls = [
            ToolCall("add", {"a": 1, "b": 2}, "x"),
            ToolCall("sub", {}, "y"),
            ToolCall("add", {"a": 9, "b": 1}, "z"),
        ]
        reply = await game.step(Turn("", [*calls, calls[0]]))
        assert [message["content"] for message in reply.messages] == ["3", "error: no such tool", "10"]
        assert reply.messages[0] == {"role": "tool", "name": "add", "tool_call_id": "x", "content": "3"}
        assert reply.reward == 1.0 and reply.done  # of two calls; the environment ended before the fourth
        assert await game.step(Turn("the end")) == Reply([], done=True)
        await game.close()

    play(episode)


@pytest.mark.parametrize(
    ("guess", "message"), [("break", r"it is wrong \(EXECUTION_ERROR\)"), ("leave", "closed the connection")]
)
def test_faults_of_the_server(play, guess, message):
    async def episode(url):
        game = environment(url, field="guess")
        await game.reset({})
        with pytest.raises(ConnectionError, match=message):
            await game.step(Turn(guess))
        await game.close()

    play(episode)


def test_a_server_without_room(play):
    async def episode(url):
        first, second = environment(url, field="guess"), environment(url, field="guess")
        await first.reset({})
        with pytest.raises(ConnectionError, match="CAPACITY_REACHED"):
            await second.reset({})
        await second.close()
        await first.close()

    play(episode, room=1)


def test_no_server(play):
    async def nothing(url):
        return url

    with pytest.raises(GrpoError, match="lists no tools: no OpenEnv server at http:"):
        openenv_tools(play(nothing))


def test_an_environment_without_tools(play, monkeypatch):
    monkeypatch.setitem(globals(), "answer", lambda kind, data: seen({"tools": []}))

    async def list_them(url):
        with pytest.raises(GrpoError, match="takes other actions"):
            await asyncio.to_thread(openenv_tools, url)

    play(list_them)
