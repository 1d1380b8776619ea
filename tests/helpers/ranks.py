"""Fast replacement of torchrun that cannot hang or outlive its test; tests/conftest.py has the fixture."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import TextIO

import pytest

REPO = Path(__file__).resolve().parents[2]
thorough = False  # --thorough: start pretrain_grpo.py with the real torchrun


def run_torchrun(nproc, script, *args, timeout=600.0, check=True, env=None) -> subprocess.CompletedProcess:
    """Run a script on ``nproc`` ranks; the fixture `torchrun` describes the arguments."""
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
    """Run torchrun; return (exit status, output of all ranks) as `run_group`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return run_group([*torchrun, *command], environment, timeout)


def run_group(command, environment, timeout) -> tuple[int | None, str]:
    """Run a program; return (exit status, its output with that of its children).

    After ``timeout`` seconds the program and its children are killed and the status is None. They are killed, too, when
    the test is interrupted: ranks that nobody waits for would keep their GPUs.
    """
    process = subprocess.Popen(
        command,
        cwd=REPO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its own process group
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


# With --thorough two processes fork the even and the odd ranks, so that adjacent ranks have different hash seeds, as
# in a real run. By default one process forks all ranks: its imports take 20 s of CPU time. All lanes of a session share
# them: the first process of the session starts them, and names their directory here.
_DIRECTORY = "WARM_RANKS"
_warm: list[subprocess.Popen] = []


def start_warm_ranks() -> None:
    """Start the processes that fork ranks, unless this session has started them."""
    if _DIRECTORY in os.environ:
        return
    os.environ[_DIRECTORY] = tempfile.mkdtemp(prefix="warm_ranks_")
    for number in range(_servers()):
        command = [sys.executable, str(REPO / "tests" / "helpers" / "warm_rank.py"), str(_socket(number))]
        _warm.append(subprocess.Popen(command, env=_environment(), stdin=subprocess.PIPE, cwd=REPO))
    while not all(_socket(number).exists() for number in range(_servers())):
        assert all(process.poll() is None for process in _warm), "warm_rank.py has ended; standard error says why"
        time.sleep(0.02)


def _servers() -> int:
    return 2 if thorough else 1


def _socket(number: int) -> Path:
    return Path(os.environ[_DIRECTORY], f"{number}.socket")


class WarmRun:
    """A run with forked ranks, equivalent to torchrun: holds the store, and ends all ranks as soon as one fails.

    ``poll`` and ``wait`` have the interface of ``subprocess.Popen``; ``pids`` are the process ids of the ranks, each
    the leader of its process group.
    """

    def __init__(self, nproc: int, command: list[str], environment: dict[str, str], output: str):
        from torch.distributed import TCPStore

        start_warm_ranks()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port}
        world |= {
            "TORCHELASTIC_RUN_ID": f"warm {uuid.uuid4()}",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        world |= {name: value for name, value in environment.items() if name == "TORCHELASTIC_RUN_ID"}
        own = [world | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(nproc)]
        environments = [environment | {name: str(value) for name, value in rank.items()} for rank in own]
        step = _servers()
        shares = [(self._connect(number), environments[number::step]) for number in range(min(step, nproc))]
        for lines, share in shares:
            lines.write(json.dumps({"argv": command, "environments": share, "output": output}) + "\n")
            lines.flush()
        started = [lines.readline().split() for lines, _ in shares]
        assert all(started), "warm_rank.py has ended; standard error says why"
        self.pids = [int(started[rank % step][rank // step]) for rank in range(nproc)]
        self.returncode: int | None = None
        self._failed: list[int] = []
        self._watching = [threading.Thread(target=self._watch, args=share, daemon=True) for share in shares]
        for thread in self._watching:
            thread.start()

    @staticmethod
    def _connect(number: int) -> TextIO:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(_socket(number)))
            return connection.makefile("rw")

    def _watch(self, lines, ranks) -> None:
        with lines:
            for _ in ranks:
                if status := int(lines.readline()):
                    self._failed.append(status)
                    self.kill()

    def poll(self) -> int | None:
        """Return the exit status (of the first failed rank, else 0), or None while ranks run."""
        if self.returncode is None and not any(thread.is_alive() for thread in self._watching):
            self.kill()  # also ends the processes that ranks have started
            self.returncode = next(iter(self._failed), 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raise ``subprocess.TimeoutExpired`` if ranks still run after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._watching:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("warm ranks", timeout or 0.0)
        return status

    def kill(self) -> None:
        """Send SIGKILL to all ranks and their child processes."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def warm_ranks(nproc, command, environment, timeout) -> tuple[int | None, str]:
    """Run forked ranks; return (exit status, output of all ranks).

    After ``timeout`` seconds the ranks are killed and the status is None.
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
    """End the processes that fork ranks, if this process has started them."""
    for process in _warm:
        process.stdin.close()
        process.wait()
    if _warm:
        shutil.rmtree(os.environ.pop(_DIRECTORY))


def alive(pid: int | str) -> bool:
    """Return whether a process runs; False for a zombie."""
    try:
        return re.search(r"State:\s+[^ZX]", Path(f"/proc/{pid}/status").read_text()) is not None
    except (FileNotFoundError, ProcessLookupError):  # the process ended before the open, or during the read
        return False


def gone(pids: Collection[int | str]) -> bool:
    """Wait up to a minute; return whether all of these processes have ended."""
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))
