"""Environments of an OpenEnv server (https://github.com/meta-pytorch/OpenEnv), which speaks JSON over a WebSocket.

The server runs in a process and a virtual environment of its own. A connection is an episode:

    -> {"type": "reset", "data": {"seed": 1}}            <- {"type": "observation", "data": {"observation": {..},
    -> {"type": "step", "data": {"message": "north"}}        "reward": 0.5, "done": false}}, or {"type": "error", ..}
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_grpo.environments.environment import Environment, Message, Reply, ToolCall, Turn
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.packages import require

_START_LIMIT = 60.0  # s
_MISTAKES = ("VALIDATION_ERROR", "INVALID_JSON")  # of the policy: an action that is none


class OpenEnv(Environment):
    """An episode on the server at ``url``. Subclasses give the URL and, where they differ, the methods below.

    A turn of an environment with ``tools`` (`openenv_tools`) calls tools, and one without a call is the last. Elsewhere
    the policy's text is the value of ``field`` in the action; with ``field`` None it is the action itself, as JSON.
    """

    url: ClassVar[str]
    field: ClassVar[str | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _check_websockets()  # here, not in the first episode: plug-ins define their classes at the start of a run

    def __init__(self) -> None:
        self._server = _Connection(self.url)

    def reset_data(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the server's reset for a data row."""
        return {"seed": row["seed"]} if "seed" in row else {}

    def action(self, turn: Turn) -> dict[str, Any]:
        """Return the action of a turn; ValueError for a text that is none."""
        if self.field is not None:
            return {self.field: turn.text}
        action = json.loads(turn.text)
        if not isinstance(action, dict):
            raise ValueError("the action must be a JSON object")
        return action

    def text(self, observation: Mapping[str, Any]) -> str:
        """Return what the policy reads of an observation: its only text, or all of its fields as JSON."""
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        await self._server.open()
        found = await self._server.ask("reset", self.reset_data(row))
        observation = found["observation"]
        return [{"role": "user", "content": self.text(observation)}] if observation else []

    async def step(self, turn: Turn) -> Reply:
        if self.tools:
            return await self._call_tools(turn)
        try:
            found = await self._server.ask("step", self.action(turn))
        except (ValueError, _Mistake) as error:
            return Reply([{"role": "user", "content": f"error: {error}"}])
        return Reply([{"role": "user", "content": self.text(found["observation"])}], found["reward"], found["done"])

    async def _call_tools(self, turn: Turn) -> Reply:
        messages, rewards, done = [], [], not turn.tool_calls
        for call in turn.tool_calls:
            content, reward, done = await self._call(call)
            messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content})
            rewards += [] if reward is None else [reward]
            if done:
                break
        return Reply(messages, sum(rewards) if rewards else None, done)

    async def _call(self, call: ToolCall) -> tuple[str, float | None, bool]:
        action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        try:
            found = await self._server.ask("step", action)
        except _Mistake as error:
            return f"error: {error}", None, False
        observation = found["observation"]
        result = observation.get("result")
        if observation.get("error"):
            content = f"error: {observation['error'].get('message')}"
        elif isinstance(result, dict) and "data" in result:  # fastmcp's result of a call
            content = result["data"]
        else:
            content = result
        return content if isinstance(content, str) else json.dumps(content), found["reward"], found["done"]

    async def close(self) -> None:
        """End the episode on the server."""
        await self._server.close()


def _check_websockets() -> None:
    require("an environment of an OpenEnv server", "websockets")


def openenv_tools(url: str) -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools of an OpenEnv server's environment; GrpoError if it lists none."""
    _check_websockets()
    try:
        found = asyncio.run(asyncio.wait_for(_listed(url), _START_LIMIT))
    except TimeoutError as error:
        raise GrpoError(f"the OpenEnv server at {url} lists no tools within {_START_LIMIT:g} s") from error
    except (ConnectionError, OSError, _Mistake) as error:
        raise GrpoError(f"the OpenEnv server at {url} lists no tools: {error}") from error
    tools = found["observation"].get("tools") or []
    if not tools:
        raise GrpoError(
            f"the OpenEnv server at {url} lists no tools: its environment takes other actions (OpenEnv.field)"
        )
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool["input_schema"],
            },
        }
        for tool in tools
    ]


async def _listed(url: str) -> dict[str, Any]:
    server = _Connection(url)
    await server.open()
    try:
        await server.ask("reset", {})
        return await server.ask("step", {"type": "list_tools"})
    finally:
        await server.close()


class _Mistake(Exception):
    """An action that the server refuses."""


class _Connection:
    """The connection of one episode."""

    def __init__(self, url: str):
        self._url = url
        self._socket: Any = None  # of websockets, once it is open

    async def open(self) -> None:
        """Connect; ConnectionError without a server."""
        from websockets.asyncio.client import connect

        address = f"ws{self._url.removeprefix('http').rstrip('/')}/ws"
        try:
            self._socket = await connect(address, max_size=None, open_timeout=_START_LIMIT)
        except Exception as error:  # of the network, or of the protocol
            raise ConnectionError(f"no OpenEnv server at {self._url}: {type(error).__name__}: {error}") from error

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's observation, reward and end of the episode.

        _Mistake for an invalid action, ConnectionError for all that is the server's fault.
        """
        assert self._socket is not None
        from websockets.exceptions import ConnectionClosed

        try:
            # A server without room says so and closes: what it said is read all the same.
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.recv())
        except ConnectionClosed as error:
            raise ConnectionError(f"the OpenEnv server at {self._url} closed the connection: {error}") from error
        found = answer.get("data", {})
        if answer.get("type") == "error":
            if found.get("code") in _MISTAKES:
                wrong = [f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in found.get("errors", ())]
                raise _Mistake("; ".join(wrong) or found.get("message"))
            raise ConnectionError(f"the OpenEnv server at {self._url}: {found.get('message')} ({found.get('code')})")
        observation = {name: value for name, value in found["observation"].items() if name != "metadata"}
        return {"observation": observation, "reward": found.get("reward"), "done": bool(found.get("done"))}

    async def close(self) -> None:
        """End the session and close the connection; nothing without one."""
        if self._socket is not None:
            await self._socket.close()
