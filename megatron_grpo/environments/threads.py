"""Threads of an environment worker, and clocks that measure how long its calls run.

A call has a time limit. The clock stands while the call waits for a thread, because others cause this wait: of 512
simultaneous calls of a program of 0.3 s, the last ones begin minutes after the first.
"""

import asyncio
import contextlib
import contextvars
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple


class Sizes(NamedTuple):
    """How many calls run at the same time in a worker."""

    threads: int = 256  # they wait more than they compute
    sandboxes: int = 1


# Seconds that a process has to answer after the time limit of a call: without an answer the call blocks the process.
GRACE = 10.0
DEFAULT_SIZES = Sizes()
sizes = DEFAULT_SIZES  # of this process; a worker sets it when it starts
_clock: contextvars.ContextVar["Clock | None"] = contextvars.ContextVar("clock", default=None)


def default_sandboxes(workers: int) -> int:
    """Return a worker's share of the CPUs: the sandbox limits the time of a program, so that more would slow it."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // (ranks * workers))


def current_clock() -> "Clock | None":
    """Return the clock of the call that runs here; None outside a worker's call."""
    return _clock.get()


class Clock:
    """Clock of one call, made in the call's task. It stands while the call waits for threads and runs in none.

    ``report`` gets True when the call begins to run, and False when it waits.
    """

    stuck: ClassVar[int] = 0  # threads of this process that still run for calls that are over

    def __init__(self, report: Callable[[bool], None]):
        self.report, self._loop = report, asyncio.get_running_loop()
        self._waiting = self._threads = 0
        self._runs = self._over = False
        self._limit: asyncio.Timeout | None = None
        self._left = 0.0  # s, while the clock stands
        _clock.set(self)

    @contextlib.asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """Context that raises TimeoutError after ``seconds`` of running."""
        self._left = seconds
        async with asyncio.timeout(seconds if self._runs else None) as self._limit:
            try:
                yield
            finally:
                self._limit = None

    def run(self) -> None:
        """Note that the call runs in its task."""
        self._count(0, 0)

    def wait(self) -> None:
        """Note that the call waits for one more thread."""
        self._count(1, 0)

    def leave(self) -> None:
        """Note that the call no longer waits for a thread."""
        self._count(-1, 0)

    def enter(self) -> None:
        """Note that the call has got a thread."""
        self._count(-1, 1)

    def exit(self) -> None:
        """Note that a thread has ended."""
        self._count(0, -1)

    def close(self) -> None:
        """Note that the call is over: threads that go on are stuck."""
        if not self._over:
            self._over = True
            Clock.stuck += self._threads

    def in_thread(self, function: Callable[[], Any]) -> Any:
        """Run a function in a thread that the call has waited for."""
        # At once, from this thread: the function may end the process.
        self.report(True)
        self._loop.call_soon_threadsafe(self.enter)
        try:
            return function()
        finally:
            self._loop.call_soon_threadsafe(self.exit)

    def _count(self, waiting: int, threads: int) -> None:
        self._waiting += waiting
        self._threads += threads
        if self._over:
            Clock.stuck += threads
            return
        runs = not self._waiting or bool(self._threads)
        if runs == self._runs:
            return
        self._runs = runs
        self.report(runs)
        if self._limit is not None and not self._limit.expired():
            now = self._loop.time()
            if runs:
                self._limit.reschedule(now + self._left)
            else:
                self._left = (self._limit.when() or now) - now
                self._limit.reschedule(None)


class Threads(ThreadPoolExecutor):
    """Thread pool that stops the clock of a call while the call is in its queue.

    As the executor of the event loop it also serves `asyncio.to_thread`.
    """

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future:
        clock = _clock.get()
        if clock is None:
            return super().submit(function, *arguments, **named)
        clock.wait()
        future = super().submit(clock.in_thread, lambda: function(*arguments, **named))
        future.add_done_callback(lambda done: clock.leave() if done.cancelled() else None)
        return future
