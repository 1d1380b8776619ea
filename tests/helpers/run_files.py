"""Rows of a run's files, for tests that compare them."""

import json
from collections.abc import Iterable
from pathlib import Path

CLOCKS = ("time/", "perf/")


def json_lines(file: Path) -> list[dict]:
    """Return all rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def metrics_of(save: Path) -> list[dict]:
    """Return the rows of metrics.jsonl in a run's directory."""
    return json_lines(save / "metrics.jsonl")


def without(rows: Iterable[dict], prefixes: tuple[str, ...] = CLOCKS) -> list[dict]:
    """Return the rows without the metrics whose names begin so: the clocks differ from run to run."""
    return [{name: value for name, value in row.items() if not name.startswith(prefixes)} for row in rows]
