"""Reward functions that were written for verl or TRL (--reward-adapter), called as these systems call them.

verl's takes one completion, ``compute_score(data_source, solution_str, ground_truth, extra_info)``, TRL's takes the
completions of a batch, here of one prompt: ``reward(prompts, completions, completion_ids, **columns)``. The names of
the parameters tell which one a function is, because both systems pass them by keyword.
"""

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron_grpo.data.answer_column import find_answers
from megatron_grpo.data.json_column import json_column
from megatron_grpo.data.row_prompt import parse_prompt
from megatron_grpo.rewards.registry import Sample, register_group_reward, register_reward, run_file
from megatron_grpo.utils.errors import GrpoError

FLAG = "--reward-adapter"
_GROUND_TRUTH = "reward_model.ground_truth"
_TRL = ("prompts", "completions", "completion_ids")
_registered: set[str] = set()


class Adapter(NamedTuple):
    """A value of --reward-adapter: the file, its function, and of a dict that it returns the key of the reward."""

    file: Path
    function: str
    key: str | None


def adapters(words: Sequence[str] | None) -> dict[str, Adapter]:
    """Return the values of --reward-adapter by the name of the reward; GrpoError for an invalid one."""
    found: dict[str, Adapter] = {}
    for word in words or []:
        parts = re.fullmatch(r"([A-Za-z0-9][\w.-]*)=(.+\.py):(\w+)(?::(\w+))?", word)
        if parts is None or parts[1] in found:
            raise GrpoError(
                f"{FLAG} {word}: expected NAME=FILE.py:FUNCTION, or NAME=FILE.py:FUNCTION:KEY for one key of a dict "
                "that it returns, with a different NAME for each"
            )
        if not Path(parts[2]).is_file():
            raise GrpoError(f"{FLAG} {word}: no such file: {parts[2]}")
        found[parts[1]] = Adapter(Path(parts[2]), parts[3], parts[4])
    return found


def register_adapters(words: Sequence[str] | None) -> None:
    """Register the functions of --reward-adapter as rewards, each once; GrpoError if a file or a function is unfit."""
    for word, (name, adapter) in zip(words or [], adapters(words).items(), strict=True):
        if word in _registered:
            continue
        function = getattr(run_file(adapter.file, FLAG), adapter.function, None)
        if not callable(function):
            raise GrpoError(f"{FLAG} {word}: {adapter.file} has no function {adapter.function}")
        parameters = inspect.signature(function).parameters
        if "solution_str" in parameters:
            register_reward(name)(partial(_call_verl, function, adapter.key))
        elif parameters.keys() & set(_TRL) and adapter.key is None:
            register_group_reward(name)(partial(_call_trl, function))
        else:
            raise GrpoError(
                f"{FLAG} {word}: its parameters are {', '.join(parameters) or 'none'}: expected verl's (data_source, "
                "solution_str, ground_truth, extra_info), or without a key TRL's (prompts, completions, ...). Write a "
                "function with another signature as a plug-in: docs/rewards.md"
            )
        _registered.add(word)


def _call_verl(function: Callable[..., Any], key: str | None, sample: Sample) -> Any:
    """Return the reward of verl's ``function``: its number, or ``key`` (by default "score") of its dict."""
    row, answers = sample.row, find_answers(sample.row)
    if not answers and not isinstance(json_column(row.get("reward_model")), dict):
        raise GrpoError(f"the row has no answer for verl's ground_truth: expected {_GROUND_TRUTH} or answer")
    extra = json_column(row.get("extra_info")) or {}
    if not isinstance(extra, dict):
        raise GrpoError(f'"extra_info" must be an object, found {extra!r:.200}')
    turns = sum(message["role"] != "system" for message in sample.messages) or 2
    result = _value(
        function(
            data_source=row.get("data_source"),
            solution_str=sample.completion,
            ground_truth=answers.get(_GROUND_TRUTH, next(iter(answers.values()), None)),
            extra_info={**extra, "num_turns": turns, "rollout_reward_scores": {}},
        )
    )
    if not isinstance(result, Mapping) and key is None:
        return result
    if not isinstance(result, Mapping) or (key or "score") not in result:
        returned = f"the keys {', '.join(map(str, result))}" if isinstance(result, Mapping) else f"{result!r:.80}"
        raise GrpoError(f'{FLAG} expects a dict with "{key or "score"}" here, and the function returned {returned}')
    return result[key or "score"]


def _call_trl(
    function: Callable[..., Any], samples: list[Sample], *, prompt_key: str = "prompt", system_prompt: str | None = None
) -> Any:
    """Return the rewards of TRL's ``function`` for the completions of one prompt."""
    row = samples[0].row
    prompt = parse_prompt(row, prompt_key, system_prompt or None, media=("image", "video"))
    given: dict[str, Any] = {
        name: [sample.row[name] for sample in samples] for name in row if name not in (prompt_key, "prompt")
    }
    given |= {
        "prompts": [prompt] * len(samples),
        "completions": [_completion(sample, prompt) for sample in samples],
        "completion_ids": [sample.token_ids for sample in samples],
        "log_extra": _log_nothing,
        "log_metric": _log_nothing,
    }
    parameters = inspect.signature(function).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing := [name for name in needed if name not in given]:
        raise GrpoError(
            f"{FLAG}: the function needs {', '.join(missing)}, which is neither a column of the row ({', '.join(row)}) "
            "nor one of TRL's arguments here (prompts, completions, completion_ids, log_extra, log_metric)"
        )
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        given = {name: given[name] for name in given if name in {p.name for p in parameters}}
    return _value(function(**given))


def _completion(sample: Sample, prompt: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a completion as TRL passes it: text after a text, messages after messages."""
    if isinstance(prompt, str):
        return sample.completion
    start = len(prompt)
    if [*map(_text, sample.messages[:start])] != [*map(_text, prompt)]:  # an agent's conversation may begin otherwise
        start = next((place for place, m in enumerate(sample.messages) if m["role"] == "assistant"), start)
    return sample.messages[start:] or [{"role": "assistant", "content": sample.completion}]


def _text(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the role and the text of a message, without its media."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    return message["role"], content


def _value(result: Any) -> Any:
    """Return what a function returned; a worker process makes one call at a time, so it waits for a coroutine."""
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _log_nothing(*_: Any) -> None:
    """TRL's log_extra and log_metric: the columns and metrics of a reward function are not logged."""
