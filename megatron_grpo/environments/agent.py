"""An agent program as an environment: its one step runs the program, which calls the policy behind a URL.

    async def run(base_url, row, **metadata) -> float | dict[str, float] | None

``--agent module:function`` or ``FILE.py:function`` names it; with --agent-python it runs in a process of that
interpreter (libraries/). ``base_url`` speaks OpenAI's protocol
(rollout/agents/), ``metadata`` has ``api_key``, which any client accepts in place of a real one, and ``model``. The
value is the reward, or several by name, of which the sum counts. A program that is no coroutine runs in a thread.
"""

import asyncio
import functools
import importlib
import inspect
import secrets
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_grpo.environments.arguments import UNDER
from megatron_grpo.environments.environment import Environment, Reply, Turn
from megatron_grpo.environments.libraries.interpreter import Interpreter
from megatron_grpo.rewards.registry import run_file
from megatron_grpo.utils.errors import GrpoError

URL = "agent_base_url"  # of the row


@functools.cache
def load(name: str) -> Callable[..., Any]:
    """Return the function of ``module:function`` or ``FILE.py:function``, "under" another interpreter or this one.

    GrpoError if there is none.
    """
    name, under, python = name.partition(UNDER)
    if under:
        interpreter = Interpreter(python, name)
        interpreter.check()
        return interpreter.run
    module, _, function = name.rpartition(":")
    if not module or not function:
        raise GrpoError(f"--agent {name}: give module:function or FILE.py:function")
    try:
        found = getattr(_file(module) if module.endswith(".py") else importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise GrpoError(f"--agent {name}: {error}. A module must be importable from the working directory") from error
    if not callable(found):
        raise GrpoError(f"--agent {name} is {found!r:.80}, not a function")
    return found


@functools.cache
def _file(path: str) -> ModuleType:
    return run_file(Path(path), "--agent")


class AgentProgram(Environment):
    """One run of an agent program."""

    def __init__(self, name: str):
        self._run = load(name)

    def reset(self, row: Mapping[str, Any]) -> None:
        # A program that is repeated after a fault has a URL of its own: what the failed one said is forgotten.
        self._url = f"{row[URL]}/{secrets.token_urlsafe(6)}/v1"
        self._row = {key: value for key, value in row.items() if key != URL}

    async def step(self, turn: Turn) -> Reply:
        run, metadata = self._run, {"api_key": "none", "model": "policy"}
        if inspect.iscoroutinefunction(run):
            value = await run(self._url, self._row, **metadata)
        else:
            value = await asyncio.to_thread(run, self._url, self._row, **metadata)
        return Reply(reward=_reward(value), done=True)


def _reward(value: Any) -> float | None:
    if isinstance(value, Mapping):
        if not all(isinstance(part, Real) for part in value.values()):
            raise TypeError(f"the agent returned {value!r:.80}, not rewards by name")
        return float(sum(value.values()))
    if value is not None and not isinstance(value, Real):
        raise TypeError(f"the agent returned {value!r:.80}, not a reward, rewards by name, or None")
    return None if value is None else float(value)
