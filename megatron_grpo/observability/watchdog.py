"""Watchdog: ends a run that hangs, names the rank that it hangs at, and writes the stacks of all ranks.

A thread in every rank publishes the rank's position (``utils/progress.py``) in the store of the run. The thread has a
connection of its own. One rank, the monitor, reads all positions; if the monitor falls silent, another rank replaces
it. The run hangs if no rank has made progress for the time limit of its phase. A rank that waits for the long rollout
of another rank does not hang, because each token of that rollout is progress. At a hang every host writes the stacks of
its ranks (``faulthandler``, on the signal SIGNAL) and the state of its stopped ranks (``/proc``) to
``{save}/hang-<time>/``, and all ranks exit with code 1. Nothing is saved, because a rank can be in the middle of an
update. The message names the newest checkpoint.

A rank is silent if its thread publishes nothing: the process is stopped, or the main thread holds Python's lock. The
position that such a rank published last can be out of date. Each thread therefore also publishes the position of one
other rank of its host, which it reads from that rank's board. The handler of SIGNAL runs while Python's lock is held.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_grpo.checkpointing.checkpoint_directory import newest_in_words
from megatron_grpo.observability.arguments import PHASES
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.rewards.pool import REWARD_MODEL_TIMEOUTS
from megatron_grpo.rewards.reward_models.arguments import reward_models
from megatron_grpo.rollout.arguments import server_urls
from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import record_for_torchrun

SIGNAL = signal.SIGRTMIN + 11  # glibc, Python, torch, NCCL, CUDA and vLLM leave the real-time signals alone
LONGER = {"start": 6, "save": 6, "export": 6, "sync": 2}  # phases that make no sign of progress for long
LONG_WAIT = 5.0  # seconds of a rank in a collective that status.json tells
SILENT = 5  # intervals without a sign of a rank's watchdog, after which the rank does not answer


def phase_limits(args: Namespace) -> dict[str, float]:
    """Return the seconds that each phase may last without a sign of progress; "" is any other moment.

    What waits for rewards, environments and servers may take the time limits of these in addition.
    """
    base = args.watchdog_timeout
    limits = {"": base} | {phase: LONGER.get(phase, 1) * base for phase in PHASES}
    of_models = REWARD_MODEL_TIMEOUTS * args.reward_model_timeout * bool(reward_models(args))
    rewards = max(args.reward_timeout * (args.reward_retries + 1), of_models)
    environments = args.environment_timeout * (args.environment_retries + 1) * bool(args.environment)
    servers = 0.0
    if server_urls(args):
        servers = args.sglang_server_timeout if args.rollout_engine == "sglang" else args.vllm_server_timeout
    for phase in ("rollout", "scoring", "eval"):
        limits[phase] += rewards + environments + servers
    limits["sync"] += servers
    limits["logprobs"] += args.teacher_server_timeout * bool(args.teacher_server)
    return limits | (args.watchdog_phase_timeouts or {})


@dataclass(frozen=True)
class State:
    """What a rank's watchdog publishes of its rank."""

    beat: int = 0  # grows as long as the watchdog runs
    position: str = "start"
    entered: int = 0  # number of phases and steps so far
    seconds: float = 0.0  # since the last sign of progress
    limit: float = 0.0  # seconds that the phase may last without one
    waits: bool = False  # for other ranks, in a collective
    place: str = ""  # innermost line of the main thread
    host: str = ""
    machine: str = ""  # equal for ranks that see each other's processes
    pid: int = 0
    stacks: int = -1  # descriptor of the file that SIGNAL writes the stacks to
    board: int = -1  # descriptor of the file with the present position
    neighbour: int = -1  # another rank of the host, or -1
    neighbour_position: str = ""  # on its board
    neighbour_first: bool = False  # `progress.Position.first`, on its board
    ended: bool = False


@dataclass(frozen=True)
class Hang:
    """What the monitor has found: the ranks that the run hangs at, and those that do not answer."""

    causes: list[int]
    silent: list[int]
    seconds: list[float]  # of all ranks, without progress
    states: list[State]

    @classmethod
    def from_json(cls, text: str) -> "Hang":
        """Read what ``json.dumps(asdict(hang))`` wrote."""
        content = json.loads(text)
        return cls(**content | {"states": [State(**state) for state in content["states"]]})


def find_hang(states: Sequence[State], unheard: Sequence[float], patience: float) -> Hang | None:
    """Return the hang of a run, or None if a rank may still be at work.

    ``unheard``: seconds since each rank's state last changed; above ``patience`` the rank is silent. Silent ranks are
    the cause. Without one it is the ranks that do not wait for others, and of several those that are furthest behind.
    A rank that is silent for longer than its limit has ended with its host, although others are still at work: torchrun
    ends only the ranks of its own host.
    """
    silent = [rank for rank, seconds in enumerate(unheard) if seconds > patience]
    answering = [rank for rank in range(len(states)) if rank not in silent and not states[rank].ended]
    running = [rank for rank, state in enumerate(states) if not state.ended]
    limit = max((states[rank].limit for rank in running), default=0.0)
    still = min((states[rank].seconds for rank in answering), default=max(unheard))
    lost = [rank for rank in silent if rank in running and unheard[rank] > states[rank].limit]
    if not running or (still <= limit and not lost):
        return None
    seconds = [max(still, state.seconds + gone) for state, gone in zip(states, unheard, strict=True)]
    causes = lost or [rank for rank in silent if rank in running]
    if not causes:
        working = [rank for rank in answering if not states[rank].waits] or answering
        first = min(states[rank].entered for rank in working)
        causes = [rank for rank in working if states[rank].entered == first]
    return Hang(causes, silent, seconds, list(states))


def limit_of(names: Sequence[str], first: bool, limits: Mapping[str, float]) -> float:
    """Return the time limit in a position, given by the names of its phases and its step: the longest of theirs.

    ``first``: its innermost phase has not ended before, and may compile, as the start may.
    """
    longest = max((limits[name] for name in names if name in limits), default=limits[""])
    return max(longest, limits["start"]) if first else longest


def with_boards(
    states: Sequence[State], unheard: Sequence[float], patience: float, limits: Mapping[str, float]
) -> list[State]:
    """Return the states, those of silent ranks with the position that their neighbours read, and with its limit.

    A silent rank without an answering neighbour keeps the position that it published last.
    """
    updated = list(states)
    for state, seconds in zip(states, unheard, strict=True):
        if state.neighbour >= 0 and seconds <= patience < unheard[state.neighbour]:
            position = state.neighbour_position
            limit = limit_of(position.split(": "), state.neighbour_first, limits)
            updated[state.neighbour] = replace(states[state.neighbour], position=position, limit=limit)
    return updated


def in_words(hang: Hang, silent: Mapping[int, tuple[str, str]]) -> str:
    """Return the sentence about a hang: ranks, hosts, phases, seconds, and what the others do.

    ``silent``: process state and position of ranks that do not answer, where a process of their host has read them.
    """
    described = []
    for rank in hang.causes[:4]:
        state = hang.states[rank]
        process, position = silent.get(rank, ("does not answer", state.position))
        details = [f"host {state.host}"]
        if rank in hang.silent:
            details.append(f"process {state.pid}: {process}")
        where = f", at {state.place}" if state.place and rank not in hang.silent else ""
        described.append(
            f"rank {rank} ({', '.join(details)}) has been in '{position}' for {hang.seconds[rank]:.0f} s{where}"
        )
    if len(hang.causes) > 4:
        described.append(f"and {len(hang.causes) - 4} other ranks")
    others: dict[str, list[int]] = {}
    for rank, state in enumerate(hang.states):
        if rank not in hang.causes and not state.ended:
            others.setdefault(state.position, []).append(rank)
    waiting = ", ".join(f"'{position}' (rank {_spans(ranks)})" for position, ranks in others.items())
    return ", ".join(described) + (f"; the others wait in {waiting}" if waiting else "")


def waits_in_words(states: Sequence[State]) -> str:
    """Return which ranks have waited LONG_WAIT seconds for which, and what these do; "" if none has, or all have."""
    running = [rank for rank, state in enumerate(states) if not state.ended]
    waiting = [rank for rank in running if states[rank].waits and states[rank].seconds >= LONG_WAIT]
    working = [rank for rank in running if not states[rank].waits]
    if not waiting or not working:
        return ""
    slowest = states[min(working, key=lambda rank: states[rank].entered)]
    return (
        f"rank {_spans(waiting)} in '{states[waiting[0]].position}' for rank {_spans(working)} in '{slowest.position}'"
    )


def _spans(ranks: Sequence[int]) -> str:
    """Return '0-2, 5' for [0, 1, 2, 5]."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


class Watchdog:
    """The watchdog of this rank: a thread from `start` to `close`. Construct it on every rank. Collective.

    ``limits``: seconds without progress by phase (`phase_limits`). ``save``: directory of the stacks, or None to print
    them.
    """

    def __init__(self, limits: Mapping[str, float], save: str | None):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.limits, self.save = limits, save
        self.shortest = min(limits.values())
        self.interval = min(5.0, self.shortest / 20)
        # The store outlives an attempt of torchrun --max-restarts; its keys must not.
        token = [os.urandom(8).hex()]
        dist.broadcast_object_list(token, src=0, group=host_group())
        default: Any = dist.distributed_c10d._get_default_store()  # torch's stubs of Store lack clone
        store = default.clone()  # a connection of this thread's own
        store.set_timeout(timedelta(seconds=max(10.0, self.shortest)))
        self.store = dist.PrefixStore(f"megatron_grpo/watchdog/{token[0]}", store)
        self.stacks = os.memfd_create("stacks")  # no file beside the run as long as nothing hangs
        faulthandler.register(SIGNAL, file=self.stacks, all_threads=True)
        self.board = os.memfd_create("position")
        os.truncate(self.board, progress.BOARD_BYTES)
        progress.show_on(self.board)
        self.main = threading.main_thread().ident
        namespace = os.stat("/proc/self/ns/pid").st_ino
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.state = State(
            host=socket.gethostname(),
            machine=f"{boot}/{namespace}",
            pid=os.getpid(),
            stacks=self.stacks,
            board=self.board,
        )
        self.monitored: list[tuple[State, float]] = []  # by rank: the newest state, and when it came
        self.monitor_sign, self.monitor_seen = "", time.monotonic()
        self.awake = time.monotonic()  # since this process was last stopped and continued
        self.neighbour_board: int | None = None
        self._publish()
        if self.rank == 0:
            self.store.set("monitor", "")
            self.store.set("hang", "")
        dist.barrier(group=host_group())
        self._find_neighbour()
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name="watchdog")

    def _find_neighbour(self) -> None:
        """Open the board of the next rank of this host."""
        states = self._read()
        mine = [rank for rank, state in enumerate(states) if state.machine == self.state.machine]
        neighbour = mine[(mine.index(self.rank) + 1) % len(mine)]
        if neighbour != self.rank:
            with contextlib.suppress(OSError):  # /proc of another user's process
                board = Path(f"/proc/{states[neighbour].pid}/fd/{states[neighbour].board}")
                self.neighbour_board = os.open(board, os.O_RDONLY)
                self.state = replace(self.state, neighbour=neighbour)

    def start(self) -> "Watchdog":
        """Start the thread."""
        self.thread.start()
        return self

    def close(self) -> None:
        """End the thread; the others no longer wait for this rank. A further call does nothing."""
        if self.closing.is_set():
            return
        self.closing.set()
        self.thread.join(1.0)
        if self.thread.is_alive():  # in a call of the store
            return
        with contextlib.suppress(RuntimeError):  # the store ended with rank 0
            self.state = replace(self.state, ended=True)
            self._publish()
        faulthandler.unregister(SIGNAL)
        progress.show_on(None)
        for descriptor in (self.stacks, self.board, self.neighbour_board):
            if descriptor is not None:
                os.close(descriptor)

    # ---- the thread

    def _run(self) -> None:
        answered = passed = time.monotonic()
        while not self.closing.wait(self.interval):
            now = time.monotonic()
            if now - passed > SILENT * self.interval:  # the process was stopped: the others' clocks stood still, too
                self.awake, self.monitored, self.monitor_seen = now, [], now
            passed = now
            try:
                self._publish()
                monitor, found = (value.decode() for value in self.store.multi_get(["monitor", "hang"]))
                answered = time.monotonic()
            except RuntimeError as error:
                if time.monotonic() - answered > self.shortest:
                    reason = str(error).partition(". ")[0]
                    self._end(
                        f"the run's store does not answer ({reason}): the host of rank 0, or its torchrun, has ended"
                    )
                continue
            if found:
                self._end_hang(Hang.from_json(found))
            if monitor != self.monitor_sign:
                self.monitor_sign, self.monitor_seen = monitor, now
            # The others take over one after the other.
            if monitor.startswith(f"{self.rank} ") or now - self.monitor_seen > (SILENT + self.rank) * self.interval:
                self._monitor(now)

    def _publish(self) -> None:
        position, now = progress.position, time.monotonic()
        board = self.neighbour_board
        neighbour, neighbour_first = ("", False) if board is None else progress.read_board(board)
        frame = sys._current_frames().get(self.main or 0)
        self.state = replace(
            self.state,
            beat=self.state.beat + 1,
            position=str(position),
            entered=position.entered,
            seconds=now - max(progress.moved, self.awake),
            limit=limit_of((*position.phases, position.step), position.first, self.limits),
            waits=waits_for_others(frame),
            place=place_of(frame),
            neighbour_position=neighbour,
            neighbour_first=neighbour_first,
        )
        self.store.set(str(self.rank), json.dumps(asdict(self.state)))

    def _read(self) -> list[State]:
        """Return the published states of all ranks."""
        return [State(**json.loads(text)) for text in self.store.multi_get([str(rank) for rank in range(self.world)])]

    def _monitor(self, now: float) -> None:
        """Read the states of all ranks; publish a hang."""
        self.store.set("monitor", f"{self.rank} {self.state.beat}")
        read = self._read()
        before = self.monitored or [(State(beat=-1), now)] * self.world
        self.monitored = [
            known if known[0].beat == state.beat else (state, now) for state, known in zip(read, before, strict=True)
        ]
        unheard, patience = [now - heard for _, heard in self.monitored], SILENT * self.interval
        progress.waits = waits_in_words(read)
        hang = find_hang(with_boards(read, unheard, patience, self.limits), unheard, patience)
        if hang is not None:
            self.store.compare_set("hang", "", json.dumps(asdict(hang)))  # the first monitor's is everyone's

    # ---- the end

    def _end_hang(self, hang: Hang) -> NoReturn:
        """Write the stacks of this host's ranks, let the first answering rank print the message, and exit."""
        answering = [rank for rank in range(self.world) if rank not in hang.silent]
        mine = [rank for rank, state in enumerate(hang.states) if state.machine == self.state.machine]
        writer = self.rank == min(set(mine) & set(answering), default=self.rank)
        directory = Path(self.save, f"hang-{time.strftime('%Y%m%d-%H%M%S')}") if self.save else None
        with contextlib.suppress(RuntimeError):  # the store has ended with another rank
            name = self.store.compare_set("directory", "", str(directory or "")).decode()
            if writer:
                written = write_stacks(hang, mine, Path(name) if name else None)
                self.store.set(f"written/{self.state.machine}", json.dumps(written))
            if self.rank == min(answering, default=self.rank):
                self._tell(hang, {hang.states[rank].machine for rank in answering}, name)
            else:
                if writer:  # of another host, which has a report of its own
                    record_for_torchrun(f"the run hangs: {in_words(hang, {})}")
                self.store.wait(["told"], timedelta(seconds=30))
        sys.stderr.flush()
        if self.rank != min(answering, default=self.rank):
            time.sleep(2.0)  # torchrun's root cause is the rank that ends first
        for rank in (
            set(mine) & set(hang.silent) if writer else ()
        ):  # torchrun waits half a minute for a stopped process
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(hang.states[rank].pid, signal.SIGKILL)
        os._exit(1)

    def _tell(self, hang: Hang, machines: Collection[str], directory: str) -> None:
        silent: dict[int, tuple[str, str]] = {}
        with contextlib.suppress(RuntimeError):  # a host that no longer answers
            keys = [f"written/{machine}" for machine in machines]
            self.store.wait(keys, timedelta(seconds=15))
            for text in self.store.multi_get(keys):
                silent |= {int(rank): tuple(read) for rank, read in json.loads(text).items()}
        stacks = f"Stacks of all ranks: {directory}/. " if directory else ""
        limit = max(state.limit for state in hang.states if not state.ended)
        who = "It gave no sign of life" if set(hang.causes) <= set(hang.silent) else "No rank made progress"
        message = (
            f"the run hangs: {in_words(hang, silent)}. {who} for {limit:.0f} s "
            f"(--watchdog-timeout, --watchdog-phase-timeouts). {stacks}{newest_in_words(self.save)}"
        )
        self._print(message, began=time.time() - max(hang.seconds[rank] for rank in hang.causes))
        self.store.set("told", "")

    def _print(self, message: str, began: float | None = None) -> None:
        print(f"\n{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
        record_for_torchrun(message, seconds=began)  # an earlier time than that of the ranks that this ends

    def _end(self, message: str) -> NoReturn:
        self._print(f"{message}. {newest_in_words(self.save)}")
        os._exit(1)


# Functions in which a rank waits for other ranks.
_WAITING = re.compile(r"/torch/distributed/|/megatron/core/pipeline_parallel/|/parallel/(initialize|agreement)\.py$")


def waits_for_others(frame: FrameType | None) -> bool:
    """Return whether a thread is within a collective, or polls the store for another rank."""
    return frame is not None and _WAITING.search(frame.f_code.co_filename) is not None


def place_of(frame: FrameType | None) -> str:
    """Return the innermost line of a thread: 'models/attention.py:120 (forward)'."""
    if frame is None:
        return ""
    path = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"


def write_stacks(hang: Hang, ranks: Sequence[int], directory: Path | None) -> dict[int, tuple[str, str]]:
    """Write a file for each of this host's ``ranks``; return process state and position of the silent ones.

    A stopped process runs no handler: its file has the state that ``/proc`` shows. ``directory`` None: print all.
    """
    silent = {}
    for rank in ranks:
        state = hang.states[rank]
        status, position = process_state(state.pid), state.position
        if rank in hang.silent:
            with (
                contextlib.suppress(OSError),  # the process has ended
                open(f"/proc/{state.pid}/fd/{state.board}", "rb") as board,
            ):
                position, _ = progress.read_board(board.fileno())
            silent[rank] = status.partition("\n")[0], position
        text = f"rank {rank}, host {state.host}, process {state.pid}, in '{position}' for {hang.seconds[rank]:.0f} s\n"
        text += f"state: {status}\n\n{stacks_of(state)}"
        if directory is None:
            print(text, file=sys.stderr)
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True)
            Path(directory, f"rank{rank}.txt").write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"{directory} cannot be written: {error.strerror}\n{text}", file=sys.stderr)
    return silent


def process_state(pid: int) -> str:
    """Return the state of a process, 'T (stopped)', and lines on what its threads wait for in the kernel."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        threads = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    except (FileNotFoundError, ProcessLookupError):
        return "it has ended"
    found = re.search(r"^State:\s+(.*)$", status, re.MULTILINE)
    lines = [found[1] if found else "unknown"]
    for thread in threads:
        facts = []
        for name in ("comm", "wchan"):
            with contextlib.suppress(OSError):
                facts.append((thread / name).read_text().strip())
        lines.append(f"  thread {thread.name}: {', waits in '.join(facts)}")
    return "\n".join(lines)


def stacks_of(state: State, patience: float = 3.0) -> str:
    """Return the stacks that SIGNAL makes a process write; a sentence if it does not answer within ``patience`` s."""
    file = Path(f"/proc/{state.pid}/fd/{state.stacks}")
    text, deadline = "", time.monotonic() + patience
    try:
        os.kill(state.pid, SIGNAL)
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, text = text, file.read_text(errors="replace")
            if text and text == before:
                return text
    except (OSError, ProcessLookupError):
        return "The process has ended.\n"
    return text or "The process does not run: it has written no stacks.\n"
