"""``status.json`` of a run: what it does now, written by a thread of rank 0 once a second. No torch.

Fields: ``state`` (running, finished or stopped), ``update`` and ``total``, ``phase`` and ``phase_seconds``,
``quiet_seconds`` (since the last sign of progress), ``rollout`` (completions, running, tokens and seconds of the rollout
under way) and ``waits`` (the ranks that wait, and for which, as the watchdog sees it). A page takes the time of the file
as that of the last sign of life.
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
        self.thread.join()
        self._write(state)

    def _write(self, state: str) -> None:
        position, now = str(progress.position), time.monotonic()
        if position != self.phase:
            self.phase, self.since = position, now
        content = {"state": state, "phase": position, "phase_seconds": round(now - self.since, 1)}
        content |= {"quiet_seconds": round(now - progress.moved, 1), "waits": progress.waits, "pid": os.getpid()}
        temporary = self.path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # a full disk, or a folder that was deleted: the run goes on
            temporary.write_text(json.dumps(content | self.facts()), encoding="utf-8")
            os.replace(temporary, self.path)


def read_status(directory: Path) -> dict[str, Any] | None:
    """Return the content of status.json with ``age``, the seconds since it was written; None without a valid file."""
    path = directory / NAME
    try:
        age = time.time() - path.stat().st_mtime
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return content | {"age": max(0.0, age)} if isinstance(content, dict) else None
