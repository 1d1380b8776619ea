"""What a reward function is, and how one is found by its name.

A reward function takes a ``Sample`` and gives a number, or None for "not mine" (left out of the weighted sum):

    from megatron_grpo.rewards.registry import Sample, register_reward

    @register_reward("short")
    def short(sample: Sample) -> float:
        return 1.0 if len(sample.token_ids) < 100 else 0.0

Save that in a file and name both: ``--external-plugins my_rewards.py --reward-funcs short``. ``async def`` works too.
A function that depends on flags has keyword-only parameters of their names (``*, max_completion_length: int``).
The modules under ``rewards/`` import neither torch nor anything that does: a worker process must start fast.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.utils.errors import GrpoError


@dataclass(frozen=True)
class Sample:
    """One completion to be scored: texts without special tokens, the prompt's whole row, and where that row stands."""

    prompt: str
    completion: str
    row: dict[str, Any]
    finish_reason: str = "stop"  # "length" when it was cut at --max-completion-length
    token_ids: list[int] = field(default_factory=list)
    source: str = ""


RewardFunction = Callable[..., float | Awaitable[float | None] | None]

# Imported when asked for, so that nobody waits for sympy who does not use it.
_BUILTIN = {
    "exact_match": "megatron_grpo.rewards.builtin.short_answer",
    "gsm8k": "megatron_grpo.rewards.builtin.short_answer",
    "accuracy": "megatron_grpo.rewards.builtin.math_answer",
    "format": "megatron_grpo.rewards.builtin.format",
    "react_format": "megatron_grpo.rewards.builtin.format",
    "cosine": "megatron_grpo.rewards.builtin.math_answer",
    "repetition": "megatron_grpo.rewards.builtin.length",
    "soft_overlong": "megatron_grpo.rewards.builtin.length",
    "countdown": "megatron_grpo.rewards.builtin.countdown",
    "tool_call": "megatron_grpo.rewards.builtin.tool_call",
    "code": "megatron_grpo.rewards.builtin.code_tests",
}
_registry: dict[str, RewardFunction] = {}
_loaded: set[Path] = set()


def register_reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that makes a function available as ``--reward-funcs name``; a name can be taken only once."""

    def register(function: RewardFunction) -> RewardFunction:
        module = getattr(function, "__module__", "?")
        taken = getattr(_registry[name], "__module__", "?") if name in _registry else _BUILTIN.get(name)
        if name in _registry or taken not in (None, module):
            raise GrpoError(f'the reward name "{name}" is taken by {taken}; choose another')
        _registry[name] = function
        return function

    return register


def load_plugins(paths: Sequence[str | Path]) -> None:
    """Runs the files of --external-plugins, each once, to register what they define; GrpoError if that fails."""
    for path in map(Path, paths):
        if not path.is_file():
            raise GrpoError(f"--external-plugins {path}: no such file")
        if path.resolve() in _loaded:
            continue
        spec = importlib.util.spec_from_file_location(f"plugin:{path}", path)
        if spec is None or spec.loader is None:
            raise GrpoError(f"--external-plugins {path}: not a Python file (.py)")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pickle look their module up
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[spec.name]
            raise GrpoError(f"--external-plugins {path}: {_where(error, path)}") from error
        _loaded.add(path.resolve())


def _where(error: BaseException, path: Path) -> str:
    """The error with the line of the file that caused it, which is not always where it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    number, text = (frames[-1].lineno, frames[-1].line) if frames else (None, None)
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}: {(error.text or '').strip()}"
    return f"line {number}: {type(error).__name__}: {error}: {text}" if frames else f"{type(error).__name__}: {error}"


def known_rewards() -> list[str]:
    """The names of the functions that ship and of those that plugins have registered."""
    return sorted(_BUILTIN.keys() | _registry.keys())


def get_rewards(names: Sequence[str], flags: Mapping[str, Any] | None = None) -> list[RewardFunction]:
    """The functions of these names, in this order, as functions of a sample alone: ``flags`` (attributes of the parsed
    arguments) fill their keyword-only parameters. GrpoError for an unknown name, with the ones there are.
    """
    functions = []
    for name in names:
        if name not in _registry and name in _BUILTIN:
            importlib.import_module(_BUILTIN[name])
        if name not in _registry:
            known = known_rewards()
            close = difflib.get_close_matches(name, known, n=1)
            hint = f' (did you mean "{close[0]}"?)' if close else ""
            raise GrpoError(
                f'--reward-funcs: no reward function "{name}"{hint}; there are {", ".join(known)}. '
                "One of your own comes from --external-plugins FILE and @register_reward, a model from --reward-model"
            )
        functions.append(_bind(name, _registry[name], flags or {}))
    return functions


def _bind(name: str, function: RewardFunction, flags: Mapping[str, Any]) -> RewardFunction:
    values = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind != parameter.KEYWORD_ONLY:
            continue
        if parameter.name in flags:
            values[parameter.name] = flags[parameter.name]
        elif parameter.default is parameter.empty:
            raise GrpoError(
                f'the reward "{name}" has a parameter {parameter.name}, and there is no flag '
                f"--{parameter.name.replace('_', '-')}: give it a default"
            )
    return partial(function, **values) if values else function
