"""A torchrun that cannot hang or outlive its test, and is quick: tests/conftest.py has it as a fixture."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
thorough = False  # --thorough: pretrain_grpo.py is started as users start it


def run_torchrun(nproc, script, *args, timeout=600.0, check=True, env=None) -> subprocess.CompletedProcess:
    """See the fixture `torchrun`."""
    command = [str(REPO / script), *map(str, args)]
    environment = _environment() | (env or {})
    own = Path(script).name != "pretrain_grpo.py"
    status, output = (warm_ranks if own or not thorough else real_torchrun)(nproc, command, environment, timeout)
    if status is None:
        pytest.fail(f"no end after {timeout:.0f} s: {' '.join(command)}\n{output}")
    if check and status:
        pytest.fail(f"exit status {status}: {' '.join(command)}\n{output}")
    return subprocess.CompletedProcess(command, status, output)


def _environment() -> dict[str, str]:
    places = REPO, REPO / "tests" / "helpers"
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, places))}


def real_torchrun(nproc, command, environment, timeout) -> tuple[int | None, str]:
    """(exit status, output of all ranks) of torchrun; after ``timeout`` seconds it is killed and the status is None."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *command],
        cwd=REPO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its own process group, so that the ranks die with their parent
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    return process.returncode, output


# Ranks of even and of odd number come from two processes, so that neighbours differ in their hash seeds, as ranks do.
_warm: list[subprocess.Popen] = []


def start_warm_ranks() -> None:
    """Start what forks ranks, if it has not been started yet."""
    while len(_warm) < 2:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPO}
        script = str(REPO / "tests" / "helpers" / "warm_rank.py")
        _warm.append(subprocess.Popen([sys.executable, script], env=_environment(), **pipes))


class WarmRun:
    """What torchrun does, with forked ranks: it keeps their store, and ends all as soon as one fails.

    ``poll`` and ``wait`` are those of ``subprocess.Popen``; ``pids`` are the ranks', each the leader of its group.
    """

    def __init__(self, nproc: int, command: list[str], environment: dict[str, str], output: str):
        from torch.distributed import TCPStore

        start_warm_ranks()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port}
        world |= {"TORCHELASTIC_RUN_ID": "warm", "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        own = [world | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(nproc)]
        environments = [environment | {name: str(value) for name, value in rank.items()} for rank in own]
        shares = [(process, environments[number::2]) for number, process in enumerate(_warm[:nproc])]
        for process, share in shares:
            process.stdin.write(json.dumps({"argv": command, "environments": share, "output": output}) + "\n")
            process.stdin.flush()
        started = [process.stdout.readline().split() for process, _ in shares]
        assert all(started), "warm_rank.py has ended; standard error says why"
        self.pids = [int(started[rank % 2][rank // 2]) for rank in range(nproc)]
        self.returncode: int | None = None
        self._failed: list[int] = []
        self._watching = [threading.Thread(target=self._watch, args=share, daemon=True) for share in shares]
        for thread in self._watching:
            thread.start()

    def _watch(self, process, ranks) -> None:
        for _ in ranks:
            if status := int(process.stdout.readline()):
                self._failed.append(status)
                self.kill()

    def poll(self) -> int | None:
        """The exit status, that of the rank which failed first; None while ranks run."""
        if self.returncode is None and not any(thread.is_alive() for thread in self._watching):
            self.kill()  # what they have started
            self.returncode = next(iter(self._failed), 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; ``subprocess.TimeoutExpired`` when ranks still run after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._watching:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("warm ranks", timeout or 0.0)
        return status

    def kill(self) -> None:
        """SIGKILL to all ranks and to what they have started."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def warm_ranks(nproc, command, environment, timeout) -> tuple[int | None, str]:
    """(exit status, output of all ranks) of forked ranks; after ``timeout`` seconds they are killed, the status is
    None.
    """
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        run = WarmRun(nproc, command, environment, output.name)
        status: int | None
        try:
            status = run.wait(timeout)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
            status = None
        return status, output.read()


def end_warm_ranks() -> None:
    """End what forks ranks."""
    for process in _warm:
        process.stdin.close()
        process.wait()


def alive(pid: int | str) -> bool:
    """Whether a process runs: one that has ended and that nobody has asked for its status does not."""
    try:
        return re.search(r"State:\s+[^ZX]", Path(f"/proc/{pid}/status").read_text()) is not None
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or while it is read
        return False


def gone(pids: Collection[int | str]) -> bool:
    """Whether these processes end within a minute."""
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))
