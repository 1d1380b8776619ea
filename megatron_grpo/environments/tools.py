"""An environment of plain functions: it runs the tool calls of a turn and answers with their results."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_grpo.environments.environment import Environment, Message, Reply, ToolCall, Turn


class ToolEnvironment(Environment):
    """Answers every tool call with the value of the function, or with its error; a turn without a call is the last."""

    def __init__(self, tools: Sequence[Callable]):
        self._tools = {tool.__name__: tool for tool in tools}

    async def step(self, turn: Turn) -> Reply:
        if not turn.tool_calls:
            return Reply(done=True)
        return Reply([await self._answer(call) for call in turn.tool_calls])

    # Coroutines need no thread, for which they would wait behind the calls of others.
    async def reset(self, row: Mapping[str, Any]) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def snapshot(self) -> dict[str, Any]:
        """Return nothing: functions have no state of an episode, so that no earlier call is repeated."""
        return {}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    async def _answer(self, call: ToolCall) -> Message:
        return {
            "role": "tool",
            "name": call.name,
            "tool_call_id": call.id,
            "content": await self._result(call.name, call.arguments),
        }

    async def _result(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what the policy reads: its own mistakes are answers, too."""
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name}; the tools are {', '.join(self._tools)}"
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return f"error: {name}: {error}"
        try:
            if inspect.iscoroutinefunction(tool):
                value = await tool(**arguments)
            else:
                value = await asyncio.to_thread(tool, **arguments)  # others go on meanwhile
        except (ToolError, ArithmeticError, LookupError, TypeError, ValueError) as error:  # others are faults
            return f"error: {error}"
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class ToolError(Exception):
    """A mistake of the policy, which a tool answers with."""
