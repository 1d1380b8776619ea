"""A torchrun that cannot hang or outlive its test, and is quick: tests/conftest.py has it as a fixture."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def run_torchrun(nproc, script, *args, timeout=600.0, check=True, env=None) -> subprocess.CompletedProcess:
    """See the fixture `torchrun`."""
    command = [str(REPO / script), *map(str, args)]
    environment = _environment() | (env or {})
    folder = (REPO / script).parent
    warm = folder.is_relative_to(REPO / "tests") or folder == REPO / "tools"
    status, output = (_warm_ranks if warm else real_torchrun)(nproc, command, environment, timeout)
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


# By rank number: each has a hash seed and random states of its own, as ranks have.
_warm: list[subprocess.Popen] = []


def _warm_ranks(nproc, command, environment, timeout) -> tuple[int | None, str]:
    """What torchrun does, with forked ranks: it keeps their store, and ends all as soon as one fails."""
    from torch.distributed import TCPStore

    while len(_warm) < nproc:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPO, "env": _environment()}
        _warm.append(subprocess.Popen([sys.executable, str(REPO / "tests" / "helpers" / "warm_rank.py")], **pipes))
    processes = _warm[:nproc]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    world |= {"TORCHELASTIC_RUN_ID": "warm", "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    with tempfile.NamedTemporaryFile("r", errors="replace") as output, ThreadPoolExecutor(nproc) as waiting:
        for rank, process in enumerate(processes):
            own = {name: str(value) for name, value in (world | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            request = {"argv": command, "env": environment | own, "output": output.name}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        started = [process.stdout.readline() for process in processes]
        assert all(started), "warm_rank.py has ended; standard error says why"
        groups = [int(line) for line in started]
        ends = [waiting.submit(process.stdout.readline) for process in processes]
        status: int | None = 0
        try:
            for end in as_completed(ends, timeout):
                if status := int(end.result()):
                    break
        except TimeoutError:
            status = None
        finally:  # those that are left, and what they have started
            for group in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
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
