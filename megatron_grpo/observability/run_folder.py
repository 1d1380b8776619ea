"""Reader of the files that a run has written to ``--save``. This module does not import torch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.utils.errors import GrpoError

# Columns of a profile's phase beside its name: heading in a report by field of ``profiling.Phase``.
PROFILE_COLUMNS = {
    "calls": "calls",
    "seconds": "seconds",
    "busy": "device busy",
    "communication": "communication",
    "only_communication": "communication alone",
    "waiting": "waiting for launches",
    "idle": "idle otherwise",
}

# Fields of every row of completions.jsonl and eval_completions.jsonl.
TEXTS: dict[str, type] = {"prompt": str, "completion": str, "finish_reason": str, "length": int, "row": int}


@dataclass(frozen=True)
class Run:
    """Rows of a run's metrics.jsonl, and the run's label in a legend."""

    label: str
    rows: list[dict[str, Any]]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return iterations and values of a metric, for the rows that have a number."""
        pairs = [(row["iteration"], row[name]) for row in self.rows if isinstance(row.get(name), int | float)]
        return [x for x, _ in pairs], [y for _, y in pairs]


@dataclass(frozen=True)
class Record:
    """Content of a run's folder."""

    run: Run
    completions: list[dict[str, Any]]
    held_out: list[dict[str, Any]]  # completions of evaluations; none of a run without them
    args: dict[str, Any]
    environment: dict[str, Any]
    profiles: list[dict[str, Any]]  # rank{R}.phases.json of each rank with --profile --use-pytorch-profiler


def read_record(directory: Path, label: str) -> Record:
    """Read the files of a run's folder; raise GrpoError, which names the file, if one is missing or damaged."""
    metrics, completions, environment = (
        directory / name for name in ("metrics.jsonl", "completions.jsonl", "environment.json")
    )
    run, samples, where = read_run(metrics, label), read_lines(completions), read_object(environment)
    for number, row in enumerate(run.rows, 1):
        for name, value in row.items():
            if not _numbers([value]):
                raise GrpoError(f"{metrics}:{number}: {name} is {value!r}, which is not a number")
    for number, sample in enumerate(samples, 1):
        if wrong := wrong_field(sample):
            raise GrpoError(f"{completions}:{number}: {wrong!r} is missing or has the wrong type")
    if not isinstance(where.get("given"), list):
        raise GrpoError(f"{environment} has no list 'given': is it the environment.json of a run?")
    profiles = [read_profile(file) for file in sorted(directory.glob("profile/rank*.phases.json"))]
    evaluations = directory / "eval_completions.jsonl"
    held_out = read_lines(evaluations) if evaluations.exists() else []
    for number, sample in enumerate(held_out, 1):
        if wrong := _wrong_kind(sample, TEXTS | {"file": str, "kind": str}) or _wrong_rewards(sample):
            raise GrpoError(f"{evaluations}:{number}: {wrong!r} is missing or has the wrong type")
    return Record(run, samples, held_out, read_object(directory / "args.json"), where, profiles)


def read_profile(file: Path) -> dict[str, Any]:
    """Read the phases of a profile; raise GrpoError, which names the file, if it is damaged."""
    profile = read_object(file)
    try:
        for phase in profile["phases"]:
            if not isinstance(phase["name"], str) or not _numbers(phase[name] for name in PROFILE_COLUMNS):
                raise TypeError(f"phase {phase['name']!r} has a value of the wrong type")
        first, last = profile["updates"]
        if not _numbers([profile["rank"], first, last]):
            raise TypeError(f"rank {profile['rank']!r} or updates {profile['updates']!r} are not numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise GrpoError(f"{file} is not the phases of a profile ({error!r}): copy the file again") from error
    return profile


def wrong_field(sample: dict[str, Any]) -> str | None:
    """Return the first field of a completions.jsonl row that ``completion_log.completion_row`` would not write."""
    if wrong := _wrong_kind(sample, TEXTS | {"picked": str}):
        return wrong
    tokens = sample.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return "tokens"
    for name in ("log_probs", "token_advantages"):
        values = sample.get(name) if name in sample or name == "log_probs" else [0.0] * len(tokens)
        if not isinstance(values, list) or len(values) != len(tokens) or not _numbers(values):
            return name
    if wrong := _wrong_rewards(sample):
        return wrong
    advantage = sample.get("advantage")
    return None if advantage is not None and _numbers([advantage]) else "advantage"


def _wrong_kind(sample: dict[str, Any], kinds: dict[str, type]) -> str | None:
    return next((name for name, kind in kinds.items() if not isinstance(sample.get(name), kind)), None)


def _wrong_rewards(sample: dict[str, Any]) -> str | None:
    rewards = sample.get("rewards")
    return None if isinstance(rewards, dict) and _numbers(rewards.values()) else "rewards"


def read_run(path: Path, label: str) -> Run:
    """Read ``metrics.jsonl``, given the file or its folder; raise GrpoError as ``read_lines`` does."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    rows = read_lines(file)
    if not rows:
        raise GrpoError(f"{file} is empty: the run has not finished its first update")
    return Run(label, rows)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's JSON-lines file; raise GrpoError, which names file and line, if one is damaged.

    A last line without a newline is ignored: the run is still writing it.
    """
    rows = []
    for number, line in enumerate(_text(file).split("\n")[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise GrpoError(f"{file}:{number} is not JSON ({error}): is it the {file.name} of a run?") from error
        if not isinstance(row, dict) or not isinstance(row.get("iteration"), int):
            raise GrpoError(f"{file}:{number} is not a row of a run (a JSON object with an 'iteration'): {line[:80]}")
        rows.append(row)
    return rows


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise GrpoError, which names the file, if it is missing or not an object."""
    try:
        content = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise GrpoError(f"{file} is not JSON ({error}): copy the file from the run again") from error
    if not isinstance(content, dict):
        raise GrpoError(f"{file} holds no JSON object: is it the {file.name} of a run?")
    return content


def _numbers(values: Iterable[Any]) -> bool:
    """Return whether all values are numbers, or None, which replaces numbers that are not finite."""
    return all(isinstance(v, int | float | None) and not isinstance(v, bool) for v in values)


def labels(paths: Sequence[Path]) -> list[str]:
    """Return the shortest final parts of the paths that are different for all runs."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GrpoError(f"{file} cannot be read ({error}): give the --save directory of a run") from error
