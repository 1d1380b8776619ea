"""Isolated execution of generated Python: the caller's side. The script ``sandbox_driver`` runs the programs."""

import functools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.utils.errors import GrpoError

_DRIVER = Path(__file__).with_name("sandbox_driver.py")
_DRIVER_TIMEOUT = 20.0  # s for the start and the answer of the driver, in addition to the time limit of the tests
_PROBE = "import collections, heapq, itertools, math, random, re\nassert input() == '1'\nprint(math.pi)\n"

# Kinds of isolation, strongest first, and a description of each.
KINDS = {
    "namespaces": "Linux namespaces (without network, other processes, and files except Python's) and limits",
    "limits": "limits on time, memory, processes and files ONLY: the code can use the network and read all files of "
    "this user (--code-sandbox auto)",
}


@dataclass(frozen=True)
class Limits:
    """Resource limits of each test; ``seconds_in_all`` limits the sum over all tests of one program."""

    seconds: float = 4.0
    seconds_in_all: float = 8.0
    memory_mb: int = 512  # address space of each process
    processes: int = 32
    file_mb: int = 16  # size of each file; with namespaces also the total of all files
    output_kb: int = 1024


class SandboxError(RuntimeError):
    """A failure of the sandbox itself: the result of the program is unknown."""


class Sandbox:
    """A driver process with one of the isolation ``KINDS``; runs one program at a time, each test in a new process."""

    def __init__(self, kind: str):
        self.kind = kind
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, program: str, tests: Sequence[dict[str, Any]], limits: Limits) -> list[dict[str, Any]]:
        """Run a Python program once for each test; return one result for each test, in the order of the tests.

        A test is {"stdin": text}, {"call": name of a function, "args": list} or {"assert": code to run after the
        program}. A result has "stdout", "value" (the return value of the call, as JSON) or "passed" (true); or else
        "fault", one line with the reason. If the sandbox fails, this raises SandboxError and ends the process; the next
        program gets a new process.
        """
        if self._process is None:
            self._process = self._start()
        job = {"program": program, "tests": list(tests)} | vars(limits)
        try:
            assert self._process.stdin
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._read_line(limits.seconds_in_all + _DRIVER_TIMEOUT))
        except (OSError, ValueError, SandboxError) as error:
            raise SandboxError(f"the sandbox failed: {error} {self.close()}".strip()) from error

    def close(self) -> str:
        """End the process; return the last line of its standard error."""
        if self._process is None:
            return ""
        self._process.kill()
        _, errors = self._process.communicate()
        self._process = None
        return errors.decode(errors="replace").strip().rpartition("\n")[2][-300:]

    def _start(self) -> subprocess.Popen[bytes]:
        folder = tempfile.gettempdir()
        return subprocess.Popen(
            # The driver stays in the process group of the reward worker, so that both end together.
            [sys.executable, "-I", "-S", str(_DRIVER), self.kind, sys.base_prefix, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
        )

    def _read_line(self, seconds: float) -> bytes:
        assert self._process and self._process.stdout
        deadline, data = time.monotonic() + seconds, b""
        poll = select.poll()  # select() takes no descriptor above 1,023
        poll.register(self._process.stdout, select.POLLIN)
        while not data.endswith(b"\n"):
            if not poll.poll(1000 * max(deadline - time.monotonic(), 0.0)):
                raise SandboxError(f"the driver did not answer within {seconds:g} s")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise SandboxError("the driver ended")
            data += part
        return data


@functools.cache
def sandbox(strict: bool) -> Sandbox:
    """Return the sandbox with the strongest isolation that passes a probe on this machine.

    GrpoError if none passes. ``strict`` allows namespaces only.
    """
    reasons = []
    for kind in list(KINDS)[: 1 if strict else None]:
        candidate = Sandbox(kind)
        try:
            (result,) = candidate.run(_PROBE, [{"stdin": "1\n"}], Limits(10.0, 10.0))
        except SandboxError as error:
            result = {"fault": str(error)}
        if result.get("stdout", "").startswith("3.14159"):
            return candidate
        reasons.append(f"{kind}: {result.get('fault', 'the program printed something else')}")
        candidate.close()
    cure = "docs/rewards.md lists the requirements"
    if strict:
        cure = (
            "allow namespaces (Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0; in a container "
            "--security-opt seccomp=unconfined, or a profile with unshare and mount; docs/rewards.md); or, if the code "
            "may use the network and read this user's files, give the reward code --code-sandbox auto: limits only"
        )
    raise GrpoError(f"generated code cannot be isolated on this machine ({'; '.join(reasons)}): {cure}")


def isolation_here(strict: bool) -> str:
    """Return the description of the isolation that `sandbox` selects on this machine; GrpoError if there is none."""
    found = sandbox(strict)
    found.close()
    return KINDS[found.kind]
