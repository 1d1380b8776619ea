"""Pool of inference servers: dispatch of requests to servers with free capacity, and fault handling."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from megatron_grpo.rollout.draft_counts import DraftCounts, no_drafts
from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.rollout.servers.jobs import Homes, Job, JobQueue, jobs_of
from megatron_grpo.rollout.servers.server import Server, Status
from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import EngineLost, GrpoError
from megatron_grpo.utils.http_client import PROBE_TIMEOUT, Fault, RequestTimeout
from megatron_grpo.utils.log import log

WATCH_INTERVAL = 2.0  # seconds between two probes of a server; shorter than any restart
JOIN_INTERVAL = 5.0  # seconds between two attempts of an excluded server to join
Load = Callable[[Server], Awaitable[None]]
RETRIES = 4  # of a request or a server, after 0.5, 1, 2, 4 seconds


def _pause(retry: int) -> float:
    return 0.5 * 2.0**retry


class ServerPool:
    """Servers of a run, driven by one process; the event loop runs only within the method calls.

    A server receives at most ``max_in_flight`` completions at a time, or a single job of at most ``job_size`` requests
    of one prompt (``max_in_flight`` if None). Further turns and completions of a prompt go to the server that has
    computed what they begin with, unless it has far more work than another (`Homes`); a further turn whose server is
    full lets some later jobs pass. Of equally loaded servers a job goes to the first from number ``first`` on: pools
    of several processes know only their own requests, and start at different servers. A failed server is probed a few
    times. A server is excluded if it makes no progress for ``timeout`` seconds while it has work, or if it has
    restarted and so lost its weights. Requests of an excluded server go to the others. `refresh` readmits servers that
    answer; with ``joins`` they receive the newest weights in the background, while the others generate. After a time
    without polls, and so without probes, requests wait for the next probes. The methods raise EngineLost if no server
    is left; with ``joins`` if none has joined ``timeout`` seconds later.
    """

    joins = False  # the newest weights can be loaded again at any time

    def __init__(
        self,
        servers: Sequence[Server],
        timeout: float,
        max_in_flight: int,
        job_size: int | None = None,
        first: int = 0,
    ):
        self.servers, self.timeout, self.max_in_flight = servers, timeout, max_in_flight
        self._from_first = [*servers[first:], *servers[:first]]
        self._job_size = job_size or max_in_flight
        self._loop = asyncio.new_event_loop()
        self._queue = JobQueue()
        self._homes = Homes()
        self._running: dict[asyncio.Task, tuple[Job, Server]] = {}
        self._probes: dict[asyncio.Task, Server] = {}
        self._joining: dict[asyncio.Task, Server] = {}
        self._newest: tuple[int, Load] | None = None  # version of the newest weights, and how a server loads them
        self._last_poll_end = time.monotonic()  # when the last poll ended
        self._watched_since = 0.0  # older probes say nothing of a server: it may have restarted since
        self.drafts: DraftCounts | None = None  # of all servers; None without drafts

    @property
    def used(self) -> Sequence[Server]:
        """Servers that share the requests: the serving ones, or all while requests wait for one that joins."""
        return self.serving() or self.servers

    @property
    def cache_tokens(self) -> int | None:
        """Tokens that all servers in use keep; None if one of them keeps none."""
        kept = [server.cache_tokens for server in self.used if server.cache_tokens is not None]
        return sum(kept) if len(kept) == len(self.used) else None

    # ---- at the start and between rollouts

    def check(self) -> None:
        """Wait at most ``timeout`` seconds for every server and check it; GrpoError for a server that cannot serve."""

        async def check_one(server: Server) -> None:
            deadline, pause = time.monotonic() + self.timeout, 0.25
            while True:
                try:
                    await server.check()
                    status = await server.status(PROBE_TIMEOUT)
                    server.process, server.drafts = status.process, status.drafts
                    server.last_progress = time.monotonic()
                    return
                except Fault as fault:
                    if not fault.retryable:
                        raise GrpoError(f"{server.url}: {fault}") from fault
                    if time.monotonic() + pause > deadline:
                        raise GrpoError(
                            f"server {server.url} is not there after {self.timeout:g} s ({fault}): start it, or "
                            "correct the address; --vllm-server-timeout (--sglang-server-timeout) waits longer"
                        ) from fault
                    if pause == 1.0:
                        log(f"waiting up to {self.timeout:g} s for server {server.url}: {fault}")
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 4.0)

        for outcome in self._call_servers(check_one, self.servers):
            if outcome is not None:
                raise outcome

    def refresh(self) -> bool:
        """Probe every server; return whether all servers that answer hold the same version of this run's weights."""

        async def probe(server: Server) -> Status:
            if server.exclusion_reason is None:
                status = await self._status_with_retries(server)
            else:
                status = await server.status(PROBE_TIMEOUT / 5)
            if server.exclusion_reason is not None or status.process != server.process:  # its flags may have changed
                await server.check()
            return status

        began = time.monotonic()
        outcomes = list(zip(self.servers, self._call_servers(probe, self.servers), strict=True))
        # Servers that answer come first, because the run ends as soon as no server is left.
        for server, outcome in sorted(outcomes, key=lambda pair: isinstance(pair[1], Fault)):
            if isinstance(outcome, Fault):
                self._exclude(server, str(outcome))
                continue
            if server.in_flight and outcome.process != server.process:
                self._lose_weights(server)
            if server.exclusion_reason is not None or outcome.process != server.process:
                again = "answers again or has restarted: it receives the weights before it generates"
                log(f"server {server.url} {again}")
                server.version, server.exclusion_reason, server.process = None, None, outcome.process
            self._count_drafts(server, outcome)
            server.last_progress, server.failures, server.next_probe = time.monotonic(), 0, 0.0
            server.confirmed = began
        versions = {server.version for server in self.serving()}
        return len(versions) == 1 and None not in versions

    def states(self) -> list[dict[str, Any]]:
        """Return what another process must know of each server to send requests to it."""
        return [{name: getattr(server, name) for name in server.shared} for server in self.servers]

    def adopt(self, states: Sequence[dict[str, Any]]) -> None:
        """Set the state of each server to that of the process that has probed it (`states`)."""
        for server, state in zip(self.servers, states, strict=True):
            vars(server).update(state)
            server.last_progress, server.failures, server.next_probe = time.monotonic(), 0, 0.0
            server.confirmed = time.monotonic()

    @staticmethod
    async def _status_with_retries(server: Server) -> Status:
        """Probe a server, with retries."""
        for retry in range(RETRIES):
            try:
                return await server.status(PROBE_TIMEOUT)
            except RequestTimeout:
                raise
            except Fault as fault:
                if not fault.retryable:
                    raise
                await asyncio.sleep(_pause(retry))
        return await server.status(PROBE_TIMEOUT)

    def serving(self) -> list[Server]:
        """Return the servers that are not excluded."""
        return [server for server in self.servers if server.exclusion_reason is None]

    def members(self) -> list[tuple[str, str]]:
        """Return (URL, process) of the serving servers, which can join the process group for weights."""
        return [(server.url, server.process) for server in self.serving()]

    def update_servers(self, version: int, load: Load | None = None) -> None:
        """Await ``load`` for every serving server, concurrently, and set its weight version to ``version``.

        ``load`` is None if the servers hold the weights already.
        """
        self._newest = (version, load) if self.joins and load else None
        self._homes.clear()  # what a server has computed with other weights is of no use
        self.each(partial(self._update, version=version, load=load))

    async def _update(self, server: Server, version: int, load: Load | None) -> None:
        server.version = None  # even if this fails, the old weights are gone
        if load:
            await load(server)
        await server.finish_update(version)
        server.confirmed = time.monotonic()
        status = await server.status(PROBE_TIMEOUT)
        server.process, server.drafts = status.process, status.drafts
        server.version = version

    async def _join(self, server: Server, version: int, load: Load) -> None:
        """Give an excluded server that answers the newest weights."""
        await server.status(PROBE_TIMEOUT)
        await server.check()
        await self._update(server, version, load)
        server.exclusion_reason, server.failures, server.last_progress = None, 0, time.monotonic()
        log(f"server {server.url} joins with the weights of version {version}")

    def sleep(self, keeps_weights: bool) -> None:
        """Put every serving server to sleep."""

        async def sleep_one(server: Server) -> None:
            await server.sleep()
            if not keeps_weights:
                server.version = None

        self.each(sleep_one, "go to sleep")

    def each(self, function: Callable[[Server], Coroutine], purpose: str = "load the weights") -> None:
        """Await ``function`` for every serving server, concurrently; exclude a server at once if it raises Fault.

        The first EngineLost cancels the other calls of ``function``.
        """

        async def call(server: Server) -> None:
            try:
                await function(server)
            except Fault as fault:
                self._exclude(server, f"it did not {purpose}: {fault}")

        self._call_servers(call, self.serving())

    def _call_servers(self, function: Callable[[Server], Coroutine], servers: Sequence[Server]) -> list[Any]:
        """Return for each server the result of ``function``, or the Fault or GrpoError that the call raised."""

        async def gather() -> list[Any]:
            tasks = [asyncio.ensure_future(function(server)) for server in servers]
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
                for lost in [error for task in done if isinstance(error := task.exception(), EngineLost)]:
                    for task in pending:
                        task.cancel()
                    await asyncio.gather(*pending, return_exceptions=True)
                    raise lost
            return [task.exception() or task.result() for task in tasks]

        for task in [*self._probes, *self._joining]:  # their results would be outdated
            task.cancel()
        self._probes.clear()
        self._joining.clear()
        outcomes = self._loop.run_until_complete(gather())
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, Fault | GrpoError):
                raise outcome
        return outcomes

    # ---- in a rollout

    def submit(self, requests: Iterable[Request], seed: int) -> None:
        """Queue requests (`jobs_of`)."""
        self._queue.extend(jobs_of(requests, seed, self._job_size))

    def poll(self, timeout: float = 0.1) -> list[Completion]:
        """Dispatch queued requests to servers with room; return completions after at most ``timeout`` seconds."""
        now = time.monotonic()
        away = now - self._last_poll_end  # time between polls does not count towards a server's time-out
        for server in self.servers:
            server.last_progress += away
        if away > WATCH_INTERVAL:
            self._watched_since = now - WATCH_INTERVAL
        try:
            return self._loop.run_until_complete(self._step(timeout))
        finally:
            self._last_poll_end = time.monotonic()

    def abort(self, ids: Iterable[int]) -> None:
        """Abort requests; close the connection of a job once all its requests are aborted."""
        aborted = set(ids)
        self._queue.abort(aborted)
        for task, (job, server) in list(self._running.items()):
            if job.abort(aborted):
                self._cancel(task, server)

    async def _step(self, timeout: float) -> list[Completion]:
        self._start_probes()
        self._dispatch()
        if not self._running and not self._probes and not self._joining:
            if self._queue:  # all wait for a retry
                await asyncio.sleep(timeout)
            return []
        done, _ = await asyncio.wait(
            [*self._running, *self._probes, *self._joining], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        finished: list[Completion] = []
        for task in done:
            if task in self._probes:
                self._handle_probe(self._probes.pop(task), task)
            elif task in self._joining:
                self._handle_join(self._joining.pop(task), task)
            elif task in self._running:  # else its server was excluded in this step
                job, server = self._running.pop(task)
                server.in_flight -= len(job.requests)
                fault = task.exception()
                if fault is None:
                    progress.advance()
                    server.failures, server.last_progress = 0, time.monotonic()
                    finished += [completion for completion in task.result() if completion.id not in job.aborted]
                elif isinstance(fault, Fault):
                    self._handle_failure(job, server, fault)
                else:
                    raise fault
            elif not task.cancelled():
                task.exception()  # retrieved so that asyncio does not report it
        self._dispatch()  # here too: the next poll may come so late that it waits for other probes
        return finished

    def _dispatch(self) -> None:
        while self._queue:
            size = len(self._queue[0].requests)
            room = self.max_in_flight - size if size < self.max_in_flight else 0
            ready = [server for server in self._from_first if server.exclusion_reason is None]
            ready = [server for server in ready if server.version is not None and not server.failures]
            if any(server.confirmed < self._watched_since for server in ready):  # all wait, else one would get all
                break
            full = [server for server in ready if server.in_flight > room]
            ready = [server for server in ready if server.in_flight <= room]
            if not ready:
                break
            job = self._queue.take(size, full, self._homes)
            size = len(job.requests)
            server = ready[0] if len(self.servers) == 1 else self._homes.find(job, ready)
            if not server.in_flight:
                server.last_progress = time.monotonic()  # it was idle
            server.in_flight += size
            job.dispatched = time.monotonic()
            self._running[self._loop.create_task(self._answers(job, server))] = (job, server)
        lost = self._newest is None and not any(server.version is not None for server in self.serving())
        if self._queue and lost:
            raise EngineLost("no server holds the weights: sync the weights first")

    async def _answers(self, job: Job, server: Server) -> list[Completion]:
        """Return the completions of a job by a server."""
        begun = {request.id: request.begun for request in job.requests}
        new = await server.generate([request.with_begun_in_prompt() for request in job.requests], job.seed)
        return [completion.after(begun[completion.id]) for completion in new]

    def _handle_failure(self, job: Job, server: Server, fault: Fault) -> None:
        self._queue.appendleft(job)
        if server.exclusion_reason is not None:
            return
        job.failures += 1
        if job.failures > RETRIES * len(self.servers):
            raise EngineLost(f"a request failed {job.failures} times, the last time at {server.url}: {fault}")
        if not fault.retryable:
            self._exclude(server, str(fault))
            return
        if not server.failures:  # otherwise another request has reported the failure
            server.failures = 1
            server.next_probe = time.monotonic() + _pause(0)

    def _start_probes(self) -> None:
        """Start the probes that are due; exclude servers without progress, and let excluded ones join."""
        now = time.monotonic()
        newest = self._newest
        if self._queue and not self.serving() and now - max(s.last_progress for s in self.servers) > self.timeout:
            raise self._lost()
        for server in self.servers:
            is_due = server.exclusion_reason is not None and now >= server.next_probe
            if newest is not None and is_due and server not in self._joining.values():
                server.next_probe = now + JOIN_INTERVAL
                self._joining[self._loop.create_task(self._join(server, *newest))] = server
        for server in self.serving():
            if (server.in_flight or server.failures) and now - server.last_progress > self.timeout:
                self._exclude(server, f"no progress for {self.timeout:g} s")
            elif now >= server.next_probe and server not in self._probes.values():
                server.probed, server.next_probe = now, now + WATCH_INTERVAL
                self._probes[self._loop.create_task(server.status(PROBE_TIMEOUT))] = server

    def _handle_probe(self, server: Server, task: asyncio.Task) -> None:
        """Handle the result of a probe."""
        fault = task.exception()
        if server.exclusion_reason is not None:
            return
        if isinstance(fault, RequestTimeout):
            server.failures = max(server.failures, 1)  # no new requests; running ones stay until the time-out
            return
        if isinstance(fault, Fault):
            server.failures += 1
            if server.failures > RETRIES or not fault.retryable:
                self._exclude(server, str(fault))
            else:
                server.next_probe = time.monotonic() + _pause(server.failures - 1)
            return
        if fault is not None:
            raise fault
        status = task.result()
        if server.version is not None and status.process != server.process:
            self._lose_weights(server)
            return
        server.confirmed = server.probed
        if not server.in_flight or status.progress is None or status.progress != server.progress:
            server.last_progress = time.monotonic()
            if server.in_flight:
                progress.advance()
        server.progress = status.progress
        server.failures = 0
        self._count_drafts(server, status)

    def _lose_weights(self, server: Server) -> None:
        """Exclude a server that has restarted."""
        for job, owner in self._running.values():
            if owner is server and job.dispatched > server.confirmed:  # perhaps the new process samples it
                job.restart()
        self._exclude(server, "it has restarted and lost its weights")

    def _handle_join(self, server: Server, task: asyncio.Task) -> None:
        fault = task.exception()
        if fault is not None and not isinstance(fault, Fault):
            raise fault
        server.next_probe = time.monotonic() + (0.0 if fault is None else JOIN_INTERVAL)
        if fault is not None:
            server.version = None
            if not fault.retryable and server.exclusion_reason != str(fault):
                log(f"server {server.url} cannot join: {fault}")
            server.exclusion_reason = str(fault)

    def read_drafts(self) -> None:
        """Add to ``drafts`` what the servers have drafted since the last look at them."""
        drafting = [server for server in self.serving() if server.drafts is not None]
        outcomes = self._call_servers(lambda server: server.status(PROBE_TIMEOUT), drafting) if drafting else []
        for server, status in zip(drafting, outcomes, strict=True):
            if not isinstance(status, Fault):  # the next probe sees to that
                self._count_drafts(server, status)

    def _count_drafts(self, server: Server, status: Status) -> None:
        """Add to ``drafts`` what a server has drafted since the last look at it; a new process counts from 0."""
        if status.drafts is None:
            return
        self.drafts = no_drafts() if self.drafts is None else self.drafts
        if server.drafts is not None and status.process == server.process:
            self.drafts = self.drafts + status.drafts - server.drafts
        server.drafts = status.drafts

    def _exclude(self, server: Server, reason: str) -> None:
        """Exclude a server until the next sync, or until it joins; put its requests at the front of the queue."""
        if server.exclusion_reason is None:
            until = "it can join again" if self.joins else "the next weight sync"
            log(f"server {server.url} is excluded until {until}: {reason}")
        server.exclusion_reason, server.version, server.failures = reason, None, 0
        server.last_progress = time.monotonic()
        server.next_probe = server.last_progress + WATCH_INTERVAL
        self._homes.drop(server)  # it loads weights before it serves
        for task, (job, owner) in list(self._running.items()):
            if owner is server:
                self._cancel(task, server)
                self._queue.appendleft(job)
        if not self.serving():
            if not self.joins:
                raise self._lost()
            progress.advance()
            log(f"no server is left to generate: waiting up to {self.timeout:g} s for one that joins")

    def _lost(self) -> EngineLost:
        reasons = "; ".join(f"{server.url}: {server.exclusion_reason}" for server in self.servers)
        return EngineLost(f"no server is left to generate ({reasons}): start the servers again")

    def _cancel(self, task: asyncio.Task, server: Server) -> None:
        job, _ = self._running.pop(task)
        server.in_flight -= len(job.requests)
        task.cancel()

    def end_rollout(self) -> None:
        """Drop all requests and close their connections."""
        self._queue.clear()
        self._probes.clear()
        self._joining.clear()
        self._homes.clear()
        for task, (_, server) in list(self._running.items()):
            self._cancel(task, server)
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))

    def close(self) -> None:
        """Close all connections."""
        self.end_rollout()

        async def close_all() -> None:
            for server in self.servers:
                await server.close()

        self._loop.run_until_complete(close_all())
        self._loop.close()
