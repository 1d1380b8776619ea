"""Pool of worker processes that run environments: a call that hangs or fails costs its own episode only.

Faults are not failures: a step that raises, times out or loses its process is repeated, from the newest snapshot or by
a new episode to which the earlier turns are repeated. An episode whose retries are used up is reported with its error;
it is never scored.

Earlier turns that are repeated may get other answers, with a clock or a counter of the world outside. Within a run the
first answers and rewards stand: the policy has read these tokens, and has sampled what follows them.
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
from megatron_grpo.environments.threads import DEFAULT_SIZES, GRACE, Sizes
from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.process_tree import end_supervised, start_supervised

_START_LIMIT = 120.0  # s, for imports on a slow disk
_SILENCE = 1.0  # s without a report, after which a process is to answer
_MAX_STUCK = 8  # threads of a process that time out and do not end
# Processes that repeat suspects at the same time: to halve 256 calls takes 8 levels, and each can have a slow call. As
# many more keep the episodes that they have cleared.
_MAX_TRIALS = 8
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
    changed: bool = False  # so did those of an episode of this run, which goes on: the first answers stay


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    ready: bool = False
    started: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    asked: float | None = None  # when it was to answer; None after a report
    episodes: set[int] = field(default_factory=set)
    calls: dict[int, None] = field(default_factory=dict)  # episodes with a call under way, in order
    running: dict[int, None] = field(default_factory=dict)  # a subset of `calls`: a thread or the event loop runs them
    suspects: set[int] = field(default_factory=set)  # episodes that are tried here and have not answered yet
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
    changed: bool = False  # see `Answer`
    tries: int = 0


class EnvironmentPool:
    """Runs the episodes of environments in ``workers`` processes; a call has ``timeout`` seconds and ``retries``.

    ``sizes``: how many calls run at the same time in a process; the others wait, which takes no time of theirs.
    """

    def __init__(
        self,
        names: Sequence[str],
        plugins: Sequence[str | Path] = (),
        workers: int = 1,
        timeout: float = 60.0,
        retries: int = 1,
        sizes: Sizes = DEFAULT_SIZES,
    ):
        self._timeout, self._retries, self._max_stuck = timeout, retries, min(_MAX_STUCK, sizes.threads)
        self._setup = {
            "names": list(names),
            "plugins": [str(Path(plugin).resolve()) for plugin in plugins],
            "path": [entry or os.getcwd() for entry in sys.path],
            "timeout": timeout,
            "sizes": sizes._asdict(),
        }
        self._episodes: dict[int, _Episode] = {}
        self._answers: list[Answer] = []
        self._failed_starts = self._next = self._calls = 0
        self._groups: deque[list[int]] = deque()  # of suspects, to be repeated
        self._trials: list[_Worker] = []  # processes that repeat them; an episode without snapshots stays there
        self._processes: list[_Worker] = []  # all
        # Called at exit at the latest.
        self.close = weakref.finalize(self, end_supervised, self._processes, os.getpid())
        self._workers = [self._start() for _ in range(workers)]
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
            episode.worker.episodes.add(key)
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
        episode.worker.episodes.add(key)
        self._send_turn(key, episode)

    def step(self, key: int, turn: Turn) -> None:
        """Tell an episode the policy's turn."""
        episode = self._episodes[key]
        calls = {name: [vars(call) for call in getattr(turn, name)] for name in ("tool_calls", "malformed_calls")}
        episode.turns.append(vars(turn) | calls | {"token_ids": list(turn.token_ids)})
        episode.tries = 0
        self._send_turn(key, episode)

    def _send_turn(self, key: int, episode: _Episode) -> None:
        if episode.lost or episode.resumes or not episode.turns:
            self._repeat(key, episode)
        else:
            self._call(key, episode, "step", episode.turns[-1])

    def _call(self, key: int, episode: _Episode, command: str, *content: Any) -> None:
        self._calls += 1
        episode.call, episode.repeats = self._calls, False
        episode.worker.calls[key] = None
        self._send(episode.worker, [command, key, self._calls, *content])

    def end(self, key: int) -> None:
        """Forget an episode."""
        if episode := self._episodes.pop(key, None):
            self._leave(key, episode)
            self._repeat_suspects()

    def poll(self, wait: float = 0.0) -> list[Answer]:
        """Return the answers that have come, after up to ``wait`` seconds if there is none."""
        by_stream = {worker.process.stdout.fileno(): worker for worker in self._processes}  # type: ignore[union-attr]
        for worker in self._processes:
            self._flush(worker)
        for stream in wait_readable(list(by_stream), 0 if self._answers else wait):
            self._read(by_stream[stream])
        now = time.monotonic()
        for worker in list(self._processes):
            if not worker.ready:
                if now - worker.started > _START_LIMIT:
                    self._replace(worker, f"did not start within {_START_LIMIT:g} s")
            elif worker.asked is not None:
                if now - worker.asked > self._timeout + GRACE:
                    self._replace(worker, f"took longer than {self._timeout:g} s (--environment-timeout)")
            elif worker.calls and now - worker.heard > _SILENCE:
                worker.asked = now
                self._send(worker, ["answer"])
            elif len(self._trials) > _MAX_TRIALS and worker in self._trials and not worker.episodes:
                end_supervised([worker])
                self._processes.remove(worker)
                self._trials.remove(worker)
        self._repeat_suspects()
        answers, self._answers = self._answers, []
        return answers

    # ---- processes

    def _start(self) -> _Worker:
        process = start_supervised("megatron_grpo.environments.worker")
        with contextlib.suppress(BrokenPipeError):  # _read finds a dead process
            process.stdin.write(json.dumps(self._setup).encode() + b"\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        os.set_blocking(process.stdin.fileno(), False)  # type: ignore[union-attr]
        self._processes.append(worker := _Worker(process))
        return worker

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
        worker.heard, worker.asked = time.monotonic(), None
        *lines, worker.unread = (worker.unread + data).split(b"\n")
        stuck = 0
        for line in lines:
            try:
                report = json.loads(line)
            except ValueError:
                report = None
            match report:
                case ["ready"]:
                    worker.ready, self._failed_starts = True, 0
                case ["answers"]:
                    pass
                case ["began", int(key), int(call)]:
                    if self._under_way(worker, key, call):
                        worker.running[key] = None
                case ["waits", int(key), int(call)]:
                    if self._under_way(worker, key, call):
                        worker.running.pop(key, None)
                case ["fatal", str(message)]:
                    self.close()
                    raise GrpoError(message)
                case ["reply", int(key), int(call), dict(reply)]:
                    progress.advance()
                    if self._under_way(worker, key, call):
                        self._reply(key, reply)
                case ["failed", int(key), int(call), str(reason), str(trace), int(now_stuck)]:
                    progress.advance()
                    stuck = max(stuck, now_stuck)
                    if self._under_way(worker, key, call):
                        self._failed(key, f"{reason}\n{trace}".rstrip())
                case _:
                    self._replace(worker, "wrote into a file descriptor that is not its own")
                    return
        if stuck >= self._max_stuck:
            self._replace(worker, "was in a process with calls that do not end", blame=False)
        elif len(worker.unread) > _MAX_REPORT:
            self._replace(worker, f"returned more than {_MAX_REPORT} bytes")

    def _under_way(self, worker: _Worker, key: int, call: int) -> bool:
        return key in worker.calls and self._episodes[key].call == call

    def _reply(self, key: int, reply: dict[str, Any]) -> None:
        episode = self._episodes[key]
        worker = episode.worker
        worker.calls.pop(key)
        worker.running.pop(key, None)
        episode.snapshot = reply["snapshot"]
        again = reply.get("answers", [])[: len(episode.answers)]
        differs = json.dumps(again) != json.dumps(episode.answers[: len(again)])
        episode.changed |= differs
        if differs and episode.resumes:  # its world may have changed since the checkpoint: the caller begins again
            self._answers.append(Answer(key, differs=True))
        elif episode.repeats:
            episode.resumes = False
            self._call(key, episode, "step", episode.turns[-1])
            return
        else:
            if not episode.resumes:
                episode.answers.append({name: reply[name] for name in ("messages", "reward", "done")})
            episode.resumes = False
            self._answers.append(Answer(key, changed=episode.changed, **episode.answers[-1]))
            episode.changed = False
        if key in worker.suspects:  # it is cleared
            worker.suspects.remove(key)
            # Without a snapshot a move would repeat its turns, and their effects, once more.
            if episode.snapshot is not None:
                self._leave(key, episode)
                self._enter(key, episode, self._next_worker())
            self._repeat_suspects()

    def _failed(self, key: int, reason: str) -> None:
        """Repeat the call of an episode, or report that the episode has failed."""
        episode = self._episodes[key]
        episode.tries += 1
        if episode.tries > self._retries:
            self._answers.append(Answer(key, error=reason))
            self.end(key)
        elif episode.lost:  # its process has ended
            self._groups.append([key])
        else:
            self._repeat(key, episode)

    def _repeat(self, key: int, episode: _Episode) -> None:
        """Begin an episode again where its last call found it, then repeat that call."""
        episode.lost = False
        episode.worker.running.pop(key, None)
        answered = max(len(episode.answers) - 1, 0)  # turns
        self._call(key, episode, "begin", episode.name, episode.row, episode.snapshot, episode.turns[:answered])
        episode.repeats = len(episode.turns) > answered

    def _enter(self, key: int, episode: _Episode, worker: _Worker) -> None:
        """Move an episode to another process, which begins it again with its next call."""
        episode.worker, episode.lost = worker, True
        worker.episodes.add(key)

    def _leave(self, key: int, episode: _Episode) -> None:
        """End an episode in its process."""
        worker = episode.worker
        worker.episodes.discard(key)
        worker.calls.pop(key, None)
        worker.running.pop(key, None)
        worker.suspects.discard(key)
        self._send(worker, ["end", key, 0])

    def _repeat_suspects(self) -> None:
        """Repeat the next groups of suspects, each in a process in which nothing else runs."""
        while self._groups:
            worker = next((worker for worker in self._trials if not worker.episodes), None)
            if worker is None and sum(bool(worker.suspects) for worker in self._trials) == _MAX_TRIALS:
                return
            if worker is None and len(self._trials) >= 2 * _MAX_TRIALS:
                worker = self._vacated()
                if worker is None:
                    return
            group = [key for key in self._groups.popleft() if key in self._episodes]
            if group and worker is None:
                self._trials.append(worker := self._start())
            for key in group:
                assert worker is not None
                episode = self._episodes[key]
                self._leave(key, episode)
                self._enter(key, episode, worker)
                worker.suspects.add(key)
                self._send_turn(key, episode)

    def _vacated(self) -> _Worker | None:
        """Return the process of the fewest cleared episodes, without them; None while calls run in all.

        Its episodes go on in other processes, which repeat their turns once more: the number of processes is limited.
        """
        idle = [worker for worker in self._trials if not worker.calls and not worker.suspects]
        worker = min(idle, key=lambda worker: len(worker.episodes), default=None)
        for key in list(worker.episodes) if worker is not None else ():
            episode = self._episodes[key]
            self._leave(key, episode)
            self._enter(key, episode, self._next_worker())
        return worker

    def _replace(self, worker: _Worker, reason: str, blame: bool = True) -> None:
        """Replace a dead or stuck process; with ``blame`` one of the calls that ran in it is to be found."""
        progress.advance()  # the search for the call at fault goes on; its halves and tries are few
        end_supervised([worker])
        self._processes.remove(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts == 3:
                self.close()
                raise GrpoError(f"an environment worker does not start: it {reason}; its output is above")
        # Without a report of one that runs, the process has ended before it could write it.
        suspects = list(worker.running or worker.calls) if blame and worker.ready else []
        others = [key for key in worker.calls if key not in suspects]
        if worker in self._trials:
            self._trials.remove(worker)
            new = None
        else:
            new = self._workers[self._workers.index(worker)] = self._start()
        for key in worker.episodes:
            self._enter(key, self._episodes[key], new or self._next_worker())
        self._groups.append([key for key in others if key in worker.suspects])  # of an earlier end
        for key in others:
            if key not in worker.suspects:
                self._send_turn(key, self._episodes[key])
        if len(suspects) == 1:
            self._failed(suspects[0], reason)
        else:
            middle = len(suspects) // 2
            self._groups += [suspects[:middle], suspects[middle:]]
        self._repeat_suspects()
