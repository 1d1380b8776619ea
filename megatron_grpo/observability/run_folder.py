"""Reading what a run has written into its ``--save`` directory; nothing here needs torch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.utils.errors import GrpoError


@dataclass(frozen=True)
class Run:
    """A run's rows of metrics.jsonl under the name that the legend shows."""

    label: str
    rows: list[dict[str, Any]]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """The iterations and values of a metric, where it was logged as a number."""
        pairs = [(row["iteration"], row[name]) for row in self.rows if isinstance(row.get(name), int | float)]
        return [x for x, _ in pairs], [y for _, y in pairs]


@dataclass(frozen=True)
class Record:
    """All that a run's folder says."""

    run: Run
    completions: list[dict[str, Any]]
    args: dict[str, Any]
    environment: dict[str, Any]


def read_record(directory: Path, label: str) -> Record:
    """Read the four files of a run's folder; raises GrpoError naming the file when one is absent or damaged."""
    metrics, completions, environment = (
        directory / name for name in ("metrics.jsonl", "completions.jsonl", "environment.json")
    )
    run, samples, where = read_run(metrics, label), read_lines(completions), read_object(environment)
    for number, row in enumerate(run.rows, 1):
        for name, value in row.items():
            if not _numbers([value]):
                raise GrpoError(f"{metrics}:{number}: {name} is {value!r}, which is no number")
    for number, sample in enumerate(samples, 1):
        if wrong := wrong_field(sample):
            raise GrpoError(f"{completions}:{number}: {wrong!r} is missing or not what a run writes")
    if not isinstance(where.get("given"), list):
        raise GrpoError(f"{environment} has no list 'given': not written by a run")
    return Record(run, samples, read_object(directory / "args.json"), where)


def wrong_field(sample: dict[str, Any]) -> str | None:
    """The first field of a row of completions.jsonl that is not as ``completion_log.completion_row`` writes it."""
    kinds = {"prompt": str, "completion": str, "finish_reason": str, "picked": str, "length": int, "row": int}
    for name, kind in kinds.items():
        if not isinstance(sample.get(name), kind):
            return name
    tokens, rewards = sample.get("tokens"), sample.get("rewards")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return "tokens"
    for name in ("log_probs", "token_advantages"):
        values = sample.get(name) if name in sample or name == "log_probs" else [0.0] * len(tokens)
        if not isinstance(values, list) or len(values) != len(tokens) or not _numbers(values):
            return name
    if not isinstance(rewards, dict) or not _numbers(rewards.values()):
        return "rewards"
    advantage = sample.get("advantage")
    return None if advantage is not None and _numbers([advantage]) else "advantage"


def read_run(path: Path, label: str) -> Run:
    """Read the ``metrics.jsonl`` of a folder (or that file itself); raises GrpoError as ``read_lines`` does."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    rows = read_lines(file)
    if not rows:
        raise GrpoError(f"{file} is empty: the run has not finished its first update")
    return Run(label, rows)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file of a run; raises GrpoError naming file and line when it is absent or broken.

    A last line without its newline is one that a running job is still writing: it is left out.
    """
    rows = []
    for number, line in enumerate(_text(file).split("\n")[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise GrpoError(f"{file}:{number} is not JSON ({error}): not the {file.name} of a run?") from error
        if not isinstance(row, dict) or not isinstance(row.get("iteration"), int):
            raise GrpoError(f"{file}:{number} is no row of a run (a JSON object with an 'iteration'): {line[:80]}")
        rows.append(row)
    return rows


def read_object(file: Path) -> dict[str, Any]:
    """A file that holds one JSON object; raises GrpoError naming it when it is absent or something else."""
    try:
        content = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise GrpoError(f"{file} is not JSON ({error}): copy it from the run again") from error
    if not isinstance(content, dict):
        raise GrpoError(f"{file} holds no JSON object: not the {file.name} of a run?")
    return content


def _numbers(values: Iterable[Any]) -> bool:
    """Whether these are numbers, or None where a run had no finite one."""
    return all(isinstance(v, int | float | None) and not isinstance(v, bool) for v in values)


def labels(paths: Sequence[Path]) -> list[str]:
    """Name each run by the shortest end of its path that tells all of them apart."""
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
