"""``status.json`` of a run: what it does now, written by a thread of rank 0 once a second. No torch.

Fields: ``state`` (running, finished or stopped), ``update`` and ``total``, ``phase`` and ``phase_seconds``,
``quiet_seconds`` (since the last sign of progress), ``rollout`` (completions, running, tokens and seconds of the
present rollout), ``waits`` (the ranks that wait, and for which, as the watchdog sees it) and ``error`` (of rank 0, that
ended the run). The time of the file is that of the last sign of life.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_grpo.utils import progress

NAME = "status.json"
INTERVAL = 1.0  # seconds between two writes


class StatusFile:
    """Writer of ``directory``/status.json until `close`. ``facts`` returns the fields that the logger knows."""

    def __init__(self, directory: Path, facts: Callable[[], dict[str, Any]]):
        self.path, self.facts = directory / NAME, facts
        self.phase, self.since = "", time.monotonic()
        self.closing = threading.Event()
        self._write("running")
        self.thread = threading.Thread(target=self._run, daemon=True, name="status")
        self.thread.start()

    def _run(self) -> None:
        while not self.closing.wait(INTERVAL):
            self._write("running")

    def close(self, state: str) -> None:
        """Write the last state, ``finished`` or ``stopped``, and end the thread."""
        self.closing.set()
        self.thread.join(10 * INTERVAL)
        if not self.thread.is_alive():  # else the file server hangs
            self._write(state)

    def _write(self, state: str) -> None:
        position, now = str(progress.position), time.monotonic()
        if position != self.phase:
            self.phase, self.since = position, now
        content = {"state": state, "phase": position, "phase_seconds": round(now - self.since, 1)}
        content |= {"quiet_seconds": round(now - progress.moved, 1), "waits": progress.waits, "pid": os.getpid()}
        content |= {"error": progress.error}
        temporary = self.path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # a full disk, or a folder that was deleted: the run goes on
            temporary.write_text(json.dumps(content | self.facts()), encoding="utf-8")
            os.replace(temporary, self.path)


def mark_stopped(directory: Path, process: int, error: str) -> None:
    """Write that ``error`` has ended the run of this ``process``, rank 0, which could not write its last state.

    Do nothing if it has, or if another process writes the file: the run of this folder goes on.
    """
    content = read_status(directory)
    if content is None or content.get("state") != "running" or content.get("pid") != process:
        return
    del content["age"]
    temporary = directory / f"{NAME}.tmp"
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(content | {"state": "stopped", "error": error}), encoding="utf-8")
        os.replace(temporary, directory / NAME)


def read_status(directory: Path) -> dict[str, Any] | None:
    """Return the content of status.json with ``age``, the seconds since it was written; None without a valid file."""
    path = directory / NAME
    try:
        age = time.time() - path.stat().st_mtime
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return content | {"age": max(0.0, age)} if isinstance(content, dict) else None


SILENT = 15.0  # seconds without a new status.json, after which a run is silent
QUIET = 30.0  # seconds without a sign of progress that are worth a word


def state_in_words(status: dict[str, Any] | None, update: int, total: int | None, row_age: float) -> dict[str, str]:
    """Return ``state`` (running, finished, stopped or silent) and ``text`` of a run.

    ``status``: of `read_status`; None of a run without the file, which is judged by ``row_age``, the seconds since its
    last row. ``update``: of that row.
    """
    done = f"update {update:,} of {total:,}" if total else f"update {update:,}"
    if status is None:
        if total and update >= total:
            return {"state": "finished", "text": f"finished: {update:,} updates"}
        return {"state": "silent", "text": f"{done}; the last row is {duration(row_age)} old"}
    if status.get("state") in ("finished", "stopped"):
        error = f": {status['error']!s:.500}" if status.get("error") else ""
        return {"state": status["state"], "text": f"{status['state']}: {done}{error}"}
    phase, age = str(status.get("phase", "")), _number(status, "age")
    if age > SILENT:
        return {"state": "silent", "text": f"silent for {duration(age)}: {done}, last in '{phase}'"}
    parts = [f"{done}: {phase} for {duration(_number(status, 'phase_seconds') + age)}"]
    rollout = status.get("rollout")
    if isinstance(rollout, dict):
        finished, running, tokens = (int(_number(rollout, name)) for name in ("finished", "running", "tokens"))
        parts.append(f"{finished:,} of {finished + running:,} completions, {tokens:,} tokens")
    if (quiet := _number(status, "quiet_seconds") + age) > QUIET:
        parts.append(f"no sign of progress for {duration(quiet)}")
    if waits := status.get("waits"):
        parts.append(f"waiting: {waits}")
    return {"state": "running", "text": "; ".join(parts)}


def _number(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else 0.0  # neither nan nor inf


def duration(seconds: float) -> str:
    """Return '90 s', '12 min' or '3.4 h'."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
