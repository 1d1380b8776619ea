"""Registry of reward functions.

A reward function takes a ``Sample`` and returns a number, or None for "not scored" (left out of the weighted sum). A
group-wise one takes all completions of one prompt, and returns a list with one value for each:

    from megatron_grpo.rewards.registry import Sample, register_group_reward, register_reward

    @register_reward("short")
    def short(sample: Sample) -> float:
        return 1.0 if sample.num_sampled < 100 else 0.0

    @register_group_reward("shortest")
    def shortest(samples: list[Sample]) -> list[float]:
        least = min(sample.num_sampled for sample in samples)
        return [float(sample.num_sampled == least) for sample in samples]

Save these functions in a file and give both flags: ``--external-plugins my_rewards.py --reward-funcs short shortest``.
``async def`` works too. A function that depends on flags has keyword-only parameters with the names of the flags, such
as ``*, max_completion_length: int``.
The modules under ``rewards/`` do not import torch at load time, not even indirectly: a worker process must start fast.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron_grpo.data.routing import reward_routes
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.packages import require
from megatron_grpo.utils.rules import check_known


@dataclass(frozen=True)
class Sample:
    """One completion to score: texts without special tokens, and the data row of the prompt with its source."""

    prompt: str
    completion: str
    row: dict[str, Any]
    finish_reason: str = "stop"  # "length" if the completion was cut at --max-completion-length; never "failed"
    token_ids: list[int] = field(default_factory=list)
    source: str = ""  # file and line of the row
    # Of an episode (--environment), of which ``completion`` is the policy's last turn: the whole conversation, and the
    # sum of the environment's rewards.
    messages: list[dict[str, Any]] = field(default_factory=list)
    environment_reward: float | None = None
    # [tokens], 0 for those of ``token_ids`` that an environment said or that begin a further sample; None: the policy
    # sampled all
    response_mask: list[int] | None = None

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled, which --max-completion-length limits."""
        return len(self.token_ids) if self.response_mask is None else sum(self.response_mask)


RewardFunction = Callable[..., Any]  # argument: a Sample; group-wise: a list of Samples. May be ``async def``.


class _Entry(NamedTuple):
    function: RewardFunction
    group_wise: bool


# Modules are imported on first use: only users of math rewards wait for the import of sympy.
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
    "environment": "megatron_grpo.rewards.builtin.environment",
}
_PACKAGE = {"accuracy": "math_verify", "cosine": "math_verify"}  # of built-in functions that need one
_WITHOUT_ROW = frozenset(("format", "react_format", "repetition", "soft_overlong", "environment"))  # read no column
_registry: dict[str, _Entry] = {}
_loaded: set[Path] = set()


def register_reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: make a function of one completion available as ``--reward-funcs name``; each name is unique."""
    return partial(_register, name, False)


def register_group_reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: make a function of all completions of a prompt available as ``--reward-funcs name``.

    The function receives the list of samples in the order of their generation index (one sample in greedy evaluation),
    and returns a list of as many values: a finite number, or None for "not scored".
    """
    return partial(_register, name, True)


def _register(name: str, group_wise: bool, function: RewardFunction) -> RewardFunction:
    module = getattr(function, "__module__", "?")
    taken = getattr(_registry[name].function, "__module__", "?") if name in _registry else _BUILTIN.get(name)
    if name in _registry or taken not in (None, module):
        raise GrpoError(f'the reward name "{name}" is already registered by {taken}: choose another name')
    _registry[name] = _Entry(function, group_wise)
    return function


def is_group_wise(name: str) -> bool:
    """Return whether a function that `get_rewards` has found scores all completions of a prompt in one call."""
    return _registry[name].group_wise


def load_plugins(paths: Sequence[str | Path]) -> None:
    """Run the files of --external-plugins, each once, to register their definitions; GrpoError if one fails.

    A file that another one has imported is not run again.
    """
    before = set(sys.modules)
    for path in map(Path, paths):
        if path.is_file() and (path.resolve() in _loaded or (_module_name(path) not in before and _is_imported(path))):
            continue
        run_file(path, "--external-plugins")
        _loaded.add(path.resolve())


def check_file(path: Path, flag: str) -> None:
    """Raise GrpoError, which names ``flag``, if a user's Python file does not exist or cannot be compiled."""
    if not path.is_file():
        raise GrpoError(f"{flag} {path}: no such file")
    if path.suffix == ".py":
        try:
            compile(path.read_bytes(), path, "exec")
        except (SyntaxError, ValueError) as error:
            raise GrpoError(f"{flag} {path}: {_error_location(error, path)}") from error


def run_file(path: Path, flag: str) -> ModuleType:
    """Run a user's Python file, and return it as a module; GrpoError, which names ``flag``, if that fails.

    The module is in a package of the file's folder: ``from .helpers import f`` imports helpers.py there.
    """
    check_file(path, flag)
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise GrpoError(f"{flag} {path}: not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up their module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise GrpoError(f"{flag} {path}: {_error_location(error, path)}") from error
    return module


def _module_name(path: Path) -> str:
    return f"{_package(path.parent)}.{path.stem.replace('.', '_')}"


def _is_imported(path: Path) -> bool:
    file = getattr(sys.modules.get(_module_name(path)), "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()


def _package(folder: Path) -> str:
    """Return the name of the package of a folder with users' files."""
    folder = folder.resolve()
    name = "plugin:" + str(folder).replace(".", "_")
    while name in sys.modules and sys.modules[name].__path__ != [str(folder)]:
        name += "_"
    package = sys.modules.setdefault(name, ModuleType(name))
    package.__path__ = [str(folder)]
    return name


def _error_location(error: BaseException, path: Path) -> str:
    """Return the error with the line of the plug-in that caused it, even if it was raised elsewhere."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name and any((path.parent / file).is_file() for file in (f"{name}.py", f"{name}/__init__.py")):
        return f"{error}: write from .{name} import NAME, because it lies in the same folder"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    number, text = (frames[-1].lineno, frames[-1].line) if frames else (None, None)
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}: {(error.text or '').strip()}"
    return f"line {number}: {type(error).__name__}: {error}: {text}" if frames else f"{type(error).__name__}: {error}"


def known_rewards() -> list[str]:
    """Return the names of all built-in functions and of those that plug-ins have registered."""
    return sorted(_BUILTIN.keys() | _registry.keys())


def check_reward(name: str) -> None:
    """Raise GrpoError for an unknown name, with all known ones; one for a function that a plug-in does not register."""
    if name not in known_rewards():
        for path in _loaded:
            if callable(getattr(sys.modules.get(_module_name(path)), name, None)):
                raise GrpoError(
                    f"--reward-funcs {name}: {path} defines the function and does not register it: write "
                    f'@register_reward("{name}") above it (from megatron_grpo.rewards.registry import register_reward)'
                )
    cure = (
        "Register a function by @register_reward in a file of --external-plugins, a model by --reward-model, or a "
        "function of verl or TRL by --reward-adapter"
    )
    check_known("--reward-funcs: unknown reward function", name, known_rewards(), cure)


def check_package(name: str) -> None:
    """Raise GrpoError if the package that a built-in function needs is not installed."""
    if package := _PACKAGE.get(name):
        require(f"--reward-funcs {name}", package, instead="give another reward")


def get_rewards(names: Sequence[str], flags: Mapping[str, Any] | None = None) -> list[RewardFunction]:
    """Return the functions of these names, in this order, with their keyword-only parameters filled from ``flags``
    (attributes of the parsed arguments). GrpoError for an unknown name, with all known ones.
    """
    functions = []
    for name in names:
        if name not in _registry and name in _BUILTIN:
            check_package(name)
            importlib.import_module(_BUILTIN[name])
        check_reward(name)
        functions.append(_fill_flags(name, _registry[name].function, flags or {}))
    return functions


def gold_check(names: Sequence[str], flags: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Return a function that raises GrpoError for a row that one of these functions cannot score, whatever the
    completion is: its gold answer is missing or malformed.

    Only built-in functions are called, with an empty completion: those of plug-ins may be slow or have side effects.
    --reward-routing says which of them score a row.
    """
    chosen = [name for name in names if name in _BUILTIN and name not in _WITHOUT_ROW]
    functions = dict(zip(chosen, get_rewards(chosen, flags), strict=True))
    routes = reward_routes(flags["reward_routing"], list(flags["reward_funcs"] or []))

    def check(row: dict[str, Any]) -> None:
        of_row = routes[row["data_source"]] if routes else functions
        for name, function in functions.items():
            if name in of_row:
                try:
                    function(Sample("", "", row))
                except GrpoError as error:
                    raise GrpoError(f'reward "{name}": {error}') from error

    return check


def _fill_flags(name: str, function: RewardFunction, flags: Mapping[str, Any]) -> RewardFunction:
    values = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind != parameter.KEYWORD_ONLY:
            continue
        if parameter.name in flags:
            values[parameter.name] = flags[parameter.name]
        elif parameter.default is parameter.empty:
            raise GrpoError(
                f'the parameter {parameter.name} of the reward "{name}" has neither a default nor a flag '
                f"--{parameter.name.replace('_', '-')}: give it a default"
            )
    return partial(function, **values) if values else function
