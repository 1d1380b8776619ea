"""What a user writes: environments and tools, registered by name in a file of --external-plugins.

An environment answers the policy's turns. An object of the class is one episode:

    from megatron_grpo.environments.registry import Environment, Reply, Turn, register_environment

    @register_environment("guess")
    class Guess(Environment):
        def reset(self, row):
            self.number = row["number"]

        def step(self, turn: Turn) -> Reply:
            guess = int(turn.text)
            if guess == self.number:
                return Reply(reward=1.0, done=True)
            return Reply([{"role": "user", "content": "higher" if guess < self.number else "lower"}], reward=0.0)

Tools are plain functions; their signatures and docstrings tell the policy what they do:

    from megatron_grpo.environments.registry import register_tools

    def add(a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: the first number
            b: the second number
        '''
        return a + b

    register_tools("adder", [add])

``--external-plugins FILE --environment guess`` (or ``adder``) uses them; a row's column "environment" names its own.
The modules of environments do not import torch at load time: worker processes must start fast.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_grpo.environments.agent import AgentProgram
from megatron_grpo.environments.arguments import AGENT
from megatron_grpo.environments.environment import Environment, Message, Reply, ToolCall, Turn
from megatron_grpo.environments.tools import ToolEnvironment
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import check_known

# For files of --external-plugins.
__all__ = ["Environment", "Message", "Reply", "ToolCall", "Turn", "register_environment", "register_tools"]


@dataclass(frozen=True)
class EnvironmentSpec:
    """A registered environment."""

    name: str
    make: Callable[[], Environment]
    functions: Sequence[Callable | Mapping[str, Any]] = ()  # or their JSON schemas
    immediate: bool = False
    videos: bool = False

    @cached_property
    def tools(self) -> list[Mapping[str, Any]]:
        """JSON schemas of the tools, for the chat template: worker processes, which need none, start without them."""
        return [tool_schema(tool) for tool in self.functions]


# Modules are imported on first use.
_BUILTIN = {
    "calculator": "megatron_grpo.environments.builtin.calculator",
    "countdown_game": "megatron_grpo.environments.builtin.countdown_game",
    "python": "megatron_grpo.environments.builtin.python_tool",
    "text_game": "megatron_grpo.environments.builtin.text_game",
}
_registry: dict[str, EnvironmentSpec] = {}


def register_environment(name: str) -> Callable[[type[Environment]], type[Environment]]:
    """Decorator: make a class available as ``--environment name``; each name is unique."""

    def register(made: type[Environment]) -> type[Environment]:
        _register(EnvironmentSpec(name, made, made.tools, made.immediate, made.videos))
        return made

    return register


def register_tools(name: str, tools: Sequence[Callable], immediate: bool = False) -> None:
    """Make an environment of functions available as ``--environment name``: it answers tool calls, and nothing else."""
    _register(EnvironmentSpec(name, lambda: ToolEnvironment(tools), tools, immediate))


def _register(spec: EnvironmentSpec) -> None:
    if spec.name in _registry:
        raise GrpoError(f'the environment name "{spec.name}" is already registered: choose another name')
    _registry[spec.name] = spec


def get_environment(name: str) -> EnvironmentSpec:
    """Return the environment of a name; GrpoError for an unknown one."""
    if name not in _registry and name.startswith(AGENT):
        _register(EnvironmentSpec(name, lambda: AgentProgram(name.removeprefix(AGENT))))
    if name not in _registry and name in _BUILTIN:
        importlib.import_module(_BUILTIN[name])
    check_environment(name)
    return _registry[name]


def check_environment(name: str) -> None:
    """Raise GrpoError for an unknown name, with all known ones; the program of an agent is not looked at."""
    if not name.startswith(AGENT):
        cure = "Register a class by @register_environment, or functions by register_tools, in a file of "
        known = _BUILTIN.keys() | _registry.keys()
        check_known("--environment: unknown environment", name, known, f"{cure}--external-plugins")


def environment_of(row: Mapping[str, Any], default: str) -> EnvironmentSpec:
    """Return the environment of a data row: that of its column "environment", or the ``default``."""
    return get_environment(row.get("environment") or default)


def videos_are_shown() -> bool:
    """Return whether a registered environment shows videos."""
    return any(spec.videos for spec in _registry.values())


def tools_of(row: Mapping[str, Any], default: str | None) -> list[Any] | None:
    """Return the schemas of the tools of a row's environment, for the chat template; None without tools.

    ``default``: --environment; without it rows have no environment.
    """
    return list(environment_of(row, default).tools) or None if default else None


def tool_schema(tool: Callable | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON schema of a tool, from a function's attribute ``schema``, or its signature and docstring."""
    if isinstance(tool, Mapping):
        return tool
    if hasattr(tool, "schema"):  # of an MCP server
        return tool.schema
    from transformers.utils import get_json_schema  # takes seconds: only functions need it

    try:
        return get_json_schema(tool)
    except Exception as error:  # of a docstring or a type that it cannot read
        raise GrpoError(
            f"the tool {getattr(tool, '__name__', tool)} needs type hints and a docstring with an Args section, as "
            f"https://huggingface.co/docs/transformers/chat_extras describes: {error}"
        ) from error
