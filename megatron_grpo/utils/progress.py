"""Progress of this rank: what its main thread is doing, and when it last moved on. The watchdog reads it.

with progress.phase("update"):         # phases nest: 'eval: rollout'
    progress.step("backward")          # the step within the innermost phase: 'update: backward'
    progress.advance()                 # a sign of progress within a step, such as a generated token

A phase begins thousands of times in a run, and a sign of progress comes with every token: both cost microseconds.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from typing import NamedTuple


class Position(NamedTuple):
    """What the main thread is doing; one object, so that another thread reads it without a lock."""

    phases: tuple[str, ...] = ()
    step: str = ""
    entered: int = 0  # number of phases and steps so far: ranks that do the same have the same number
    first: bool = False  # the innermost phase has not ended before: it may compile

    def __str__(self) -> str:
        return ": ".join(filter(None, (*self.phases, self.step))) or "between two phases"


position = Position()
moved = time.monotonic()  # of the last sign of progress
signs = 0  # of progress so far
waits = ""  # which ranks wait for which, as the watchdog of this rank saw it last
error = ""  # that ended the run
_ended: set[str] = set()  # phases that have ended
_board: mmap.mmap | None = None
BOARD_BYTES = 256


def show_on(descriptor: int | None) -> None:
    """Write the position to a file, too, from where another process reads it if this one is stopped (`read_board`).

    None: no longer.
    """
    global _board
    _board = None if descriptor is None else mmap.mmap(descriptor, BOARD_BYTES)
    _begin(position)


def _begin(new: Position) -> None:
    global position
    position = new
    advance()
    if _board is not None:
        _board[:] = f"{new.first:d}{new}".encode()[:BOARD_BYTES].ljust(BOARD_BYTES)


def read_board(descriptor: int) -> tuple[str, bool]:
    """Return (position as text, `Position.first`) from the file of another process's `show_on`."""
    text = os.pread(descriptor, BOARD_BYTES, 0).decode().strip()
    return text[1:], text[:1] == "1"


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Context of a phase; phases nest."""
    outer = position
    _begin(Position((*outer.phases, name), "", outer.entered + 1, name not in _ended))
    try:
        yield
    finally:
        _ended.add(name)
        _begin(outer._replace(entered=position.entered + 1))


def step(name: str) -> None:
    """Begin a step within the innermost phase; it ends with the next step, or with the phase."""
    _begin(position._replace(step=name, entered=position.entered + 1))


def advance() -> None:
    """Note a sign of progress within a step: anything that moved. Any thread may."""
    global moved, signs
    moved = time.monotonic()
    signs += 1
