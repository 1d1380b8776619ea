"""Pool of worker processes that run environments: a call that hangs or fails costs its own episode only.

Faults are not failures: a step that raises, times out or loses its process is repeated, from the newest snapshot or by
a new episode to which the earlier turns are repeated. An episode whose retries are used up is reported with its error;
it is never scored.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_readable
from pathlib import Path
from typing import Any

from megatron_grpo.environments.environment import Turn
from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.process_tree import end_supervised, start_supervised

_START_LIMIT = 120.0  # s, for imports on a slow disk
_GRACE = 10.0  # s beyond the time limit of a call, after which its process is stuck
_MAX_STUCK = 8  # threads of a process that time out and do not end
_MAX_REPORT = 2**28  # bytes


@dataclass(frozen=True)
class Answer:
    """What an environment said; ``error`` is the reason why the episode failed, else None."""

    key: int
    messages: Sequence[dict[str, Any]] = ()
    reward: float | None = None
    done: bool = False
    error: str | None = None
    differs: bool = False  # a resumed episode cannot go on: its earlier turns got other answers than before


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    ready: bool = False
    started: float = field(default_factory=time.monotonic)
    # Calls that were under way when a process ended: they are repeated one by one, until the guilty one is known.
    suspects: deque[int] | None = None
    unread: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Episode:
    name: str
    row: Mapping[str, Any]
    worker: _Worker
    turns: list[dict[str, Any]] = field(default_factory=list)  # all so far, the last one answered or under way
    answers: list[dict[str, Any]] = field(default_factory=list)  # to the reset, then to each turn
    snapshot: Any = None
    resumes: bool = False  # of a checkpoint: its environment has not been restored yet
    call: int = 0  # number of the call under way; replies to others are late
    repeats: bool = False  # the call is a "begin" before a repeated step: its reply is no answer
    lost: bool = False  # its process has ended: the next step begins it again
    waits_since: float | None = None
    tries: int = 0


class EnvironmentPool:
    """Runs the episodes of environments in ``workers`` processes; a call has ``timeout`` seconds and ``retries``."""

    def __init__(
        self,
        names: Sequence[str],
        plugins: Sequence[str | Path] = (),
        workers: int = 1,
        timeout: float = 60.0,
        retries: int = 1,
    ):
        self._timeout, self._retries = timeout, retries
        self._setup = {
            "names": list(names),
            "plugins": [str(Path(plugin).resolve()) for plugin in plugins],
            "path": [entry or os.getcwd() for entry in sys.path],
            "timeout": timeout,
        }
        self._episodes: dict[int, _Episode] = {}
        self._answers: list[Answer] = []
        self._failed_starts = self._next = self._calls = 0
        self._workers: list[_Worker] = []
        self.close = weakref.finalize(self, end_supervised, self._workers, os.getpid())  # called at exit at the latest
        self._workers += [self._start() for _ in range(workers)]
        while not all(worker.ready for worker in self._workers):
            self.poll(0.1)

    # ---- episodes

    def begin(self, key: int, name: str, row: Mapping[str, Any]) -> None:
        """Begin an episode; its answer has the messages of reset."""
        self._open(key, _Episode(name, row, self._next_worker()))

    def resume(self, key: int, row: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Continue an episode of another process from its `state`; the next answer is the episode's newest one.

        An environment without snapshots is reset, and gets the earlier turns again; if it answers otherwise, the
        answer is that it ``differs``.
        """
        turns, answers = [*state["turns"]], [*state["answers"]]
        episode = _Episode(state["name"], row, self._next_worker(), turns, answers, state["snapshot"], resumes=True)
        if answers[-1]["done"]:  # nothing is left to be asked
            self._episodes[key] = episode
            self._answers.append(Answer(key, **answers[-1]))
        else:
            self._open(key, episode)

    def state(self, key: int) -> dict[str, Any] | None:
        """Return what `resume` needs of an episode, as JSON; None if it has failed."""
        episode = self._episodes.get(key)
        if episode is None:
            return None
        return {
            "name": episode.name,
            "turns": [*episode.turns],
            "answers": [*episode.answers],
            "snapshot": episode.snapshot,
        }

    def _next_worker(self) -> _Worker:
        self._next += 1
        return self._workers[(self._next - 1) % len(self._workers)]

    def _open(self, key: int, episode: _Episode) -> None:
        self._episodes[key] = episode
        if episode.worker.suspects is not None:
            episode.worker.suspects.append(key)
        else:
            self._send_turn(key, episode)

    def step(self, key: int, turn: Turn) -> None:
        """Tell an episode the policy's turn."""
        episode = self._episodes[key]
        calls = {name: [vars(call) for call in getattr(turn, name)] for name in ("tool_calls", "malformed_calls")}
        episode.turns.append(vars(turn) | calls | {"token_ids": list(turn.token_ids)})
        episode.tries = 0
        if episode.worker.suspects is not None:
            episode.worker.suspects.append(key)
        else:
            self._send_turn(key, episode)

    def _send_turn(self, key: int, episode: _Episode) -> None:
        if episode.lost or episode.resumes or not episode.turns:
            self._repeat(key, episode)
        else:
            self._call(key, episode, "step", episode.turns[-1])

    def _call(self, key: int, episode: _Episode, command: str, *content: Any) -> None:
        self._calls += 1
        episode.call, episode.repeats, episode.waits_since = self._calls, False, time.monotonic()
        self._send(episode.worker, [command, key, self._calls, *content])

    def end(self, key: int) -> None:
        """Forget an episode."""
        if episode := self._episodes.pop(key, None):
            self._send(episode.worker, ["end", key, 0])
            self._next_suspect(episode.worker)

    def poll(self, wait: float = 0.0) -> list[Answer]:
        """Return the answers that have come, after up to ``wait`` seconds if there is none."""
        by_stream = {worker.process.stdout.fileno(): worker for worker in self._workers}  # type: ignore[union-attr]
        for worker in self._workers:
            self._flush(worker)
        for stream in wait_readable(list(by_stream), 0 if self._answers else wait):
            self._read(by_stream[stream])  # type: ignore[index]
        now = time.monotonic()
        for worker in list(self._workers):
            waiting = [e.waits_since for e in self._under_way_in(worker).values()]
            if not worker.ready and now - worker.started > _START_LIMIT:
                self._replace(worker, f"did not start within {_START_LIMIT:g} s")
            elif worker.ready and waiting and now - min(waiting) > self._timeout + _GRACE:
                self._replace(worker, f"took longer than {self._timeout:g} s (--environment-timeout)")
        answers, self._answers = self._answers, []
        return answers

    # ---- processes

    def _start(self) -> _Worker:
        process = start_supervised("megatron_grpo.environments.worker")
        with contextlib.suppress(BrokenPipeError):  # _read finds a dead process
            process.stdin.write(json.dumps(self._setup).encode() + b"\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        os.set_blocking(process.stdin.fileno(), False)  # type: ignore[union-attr]
        return _Worker(process)

    def _send(self, worker: _Worker, command: Any) -> None:
        worker.unsent += json.dumps(command).encode() + b"\n"
        self._flush(worker)

    @staticmethod
    def _flush(worker: _Worker) -> None:
        """Write what the pipe takes; the rest waits, so that a worker that is busy does not stop the rollout."""
        try:
            while worker.unsent and worker.ready:  # before that it would read more than the first line
                del worker.unsent[: os.write(worker.process.stdin.fileno(), worker.unsent)]  # type: ignore[union-attr]
        except (BlockingIOError, BrokenPipeError):  # _read finds a dead process
            pass

    def _read(self, worker: _Worker) -> None:
        data = os.read(worker.process.stdout.fileno(), 1 << 20)  # type: ignore[union-attr]
        if not data:
            self._replace(worker, "ended its process")
            return
        *lines, worker.unread = (worker.unread + data).split(b"\n")
        for line in lines:
            try:
                report = json.loads(line)
            except ValueError:
                report = None
            match report:
                case ["ready"]:
                    worker.ready, self._failed_starts = True, 0
                    for episode in self._under_way_in(worker).values():
                        episode.waits_since = time.monotonic()
                case ["fatal", str(message)]:
                    self.close()
                    raise GrpoError(message)
                case ["reply", int(key), int(call), dict(reply)]:
                    self._reply(key, call, reply)
                case ["failed", int(key), int(call), str(reason), str(trace), int(stuck)]:
                    if self._under_way(key, call):
                        self._failed(key, f"{reason}\n{trace}".rstrip())
                    if stuck >= _MAX_STUCK:
                        self._replace(worker, "was in a process with calls that do not end", blame=False)
                        return
                case _:
                    self._replace(worker, "wrote into a file descriptor that is not its own")
                    return
        if len(worker.unread) > _MAX_REPORT:
            self._replace(worker, f"returned more than {_MAX_REPORT} bytes")

    def _under_way(self, key: int, call: int) -> bool:
        return key in self._episodes and self._episodes[key].call == call

    def _reply(self, key: int, call: int, reply: dict[str, Any]) -> None:
        progress.advance()
        if not self._under_way(key, call):
            return
        episode = self._episodes[key]
        episode.snapshot, episode.waits_since = reply["snapshot"], None
        again = reply.get("answers", [])
        if episode.resumes and json.dumps(again) != json.dumps(episode.answers[: len(again)]):
            self._answers.append(Answer(key, differs=True))
        elif episode.repeats:
            episode.resumes = False
            self._call(key, episode, "step", episode.turns[-1])
            return
        else:
            if not episode.resumes:
                episode.answers.append({name: reply[name] for name in ("messages", "reward", "done")})
            episode.resumes = False
            self._answers.append(Answer(key, **episode.answers[-1]))
        self._next_suspect(episode.worker)

    def _failed(self, key: int, reason: str) -> None:
        """Repeat the call of an episode, or report that the episode has failed."""
        episode = self._episodes[key]
        episode.tries += 1
        if episode.tries > self._retries:
            self._answers.append(Answer(key, error=reason))
            self.end(key)
        else:
            self._repeat(key, episode)

    def _repeat(self, key: int, episode: _Episode) -> None:
        """Begin an episode again where its last call found it, then repeat that call."""
        episode.lost = False
        answered = max(len(episode.answers) - 1, 0)  # turns
        self._call(key, episode, "begin", episode.name, episode.row, episode.snapshot, episode.turns[:answered])
        episode.repeats = len(episode.turns) > answered

    def _under_way_in(self, worker: _Worker) -> dict[int, _Episode]:
        return {k: e for k, e in self._episodes.items() if e.worker is worker and e.waits_since is not None}

    def _next_suspect(self, worker: _Worker) -> None:
        """Repeat the next call of a process that has ended, when no call is under way in its successor."""
        while worker.suspects and not self._under_way_in(worker):
            key = worker.suspects.popleft()
            if key in self._episodes:
                self._send_turn(key, self._episodes[key])
        if not worker.suspects and not self._under_way_in(worker):
            worker.suspects = None

    def _replace(self, worker: _Worker, reason: str, blame: bool = True) -> None:
        """Replace a dead or stuck process; with ``blame`` its call has failed, if one call only was under way."""
        end_supervised([worker])
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts == 3:
                self.close()
                raise GrpoError(f"an environment worker does not start: it {reason}; its output is above")
        under_way = self._under_way_in(worker)
        new = self._workers[self._workers.index(worker)] = self._start()
        new.suspects = deque([*under_way, *(worker.suspects or ())])
        for episode in self._episodes.values():
            if episode.worker is worker:
                episode.worker, episode.lost, episode.waits_since = new, True, None
        if blame and len(under_way) == 1:
            ((key, episode),) = under_way.items()
            new.suspects.popleft()
            self._failed(key, reason)
        self._next_suspect(new)
