"""An agent program under another interpreter (--agent-python): a process beside each environment worker runs it."""

import asyncio
import itertools
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_grpo.environments import threads
from megatron_grpo.utils.errors import GrpoError

_PROCESS = Path(__file__).with_name("process.py")
_LONGEST = 2**28  # bytes of a reply


class _Run(NamedTuple):
    done: asyncio.Future[Any]
    clock: threads.Clock | None  # of the call, which waits until the run has begun


class Interpreter:
    """Runs the agent program ``name`` under ``python``; a process that has ended is started again by the next run."""

    def __init__(self, python: str, name: str):
        self._python, self._name = python, name
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._runs: dict[int, _Run] = {}
        self._cancelled: set[int] = set()  # runs, which the process has not read yet
        self._numbers = itertools.count()
        self._reads: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Load the program once; GrpoError if the interpreter cannot."""
        if shutil.which(self._python) is None:
            raise GrpoError(f"--agent-python {self._python}: no such program")
        done = subprocess.run([self._python, _PROCESS, self._name, "1"], input=b"", stdout=subprocess.PIPE)
        match [json.loads(line) for line in done.stdout.splitlines()]:
            case [["ready"]]:
                return
            case [["fatal", str(reason)]]:
                raise GrpoError(f"--agent {self._name} under --agent-python {self._python}: {reason}")
        raise GrpoError(f"--agent-python {self._python} ended with {done.returncode} and no report; see above")

    async def run(self, base_url: str, row: Mapping[str, Any], **metadata: Any) -> Any:
        """Return the program's value; RuntimeError with its error, ConnectionError if the process ended."""
        async with self._starting:
            process = self._process or await self._start()
        number = next(self._numbers)
        run = self._runs[number] = _Run(asyncio.get_running_loop().create_future(), threads.current_clock())
        if run.clock is not None:
            run.clock.wait()
        try:
            await self._send(process, ["run", number, base_url, row, metadata])
            return await run.done
        except asyncio.CancelledError:
            self._cancelled.add(number)
            asyncio.get_running_loop().call_later(threads.GRACE, self._end_blocked, process, number)
            await self._send(process, ["cancel", number])
            raise
        finally:
            self._runs.pop(number, None)

    def _end_blocked(self, process: asyncio.subprocess.Process, number: int) -> None:
        if number in self._cancelled and process.returncode is None:
            process.kill()

    async def _start(self) -> asyncio.subprocess.Process:
        process = self._process = await asyncio.create_subprocess_exec(
            self._python,
            str(_PROCESS),
            self._name,
            str(threads.sizes.threads),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST,
        )
        self._reads = asyncio.create_task(self._read(process))
        return process

    @staticmethod
    async def _send(process: asyncio.subprocess.Process, command: Any) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(command).encode() + b"\n")
            await process.stdin.drain()
        except ConnectionError:  # _read finds the end
            pass

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        ended = "has ended"
        while line := await process.stdout.readline():
            match json.loads(line):
                case ["began", int(number)] if number in self._runs:
                    if (clock := self._runs[number].clock) is not None:
                        clock.leave()
                case ["value", int(number), content] if number in self._runs:
                    self._runs.pop(number).done.set_result(content)
                case ["failed", int(number), str(reason)] if number in self._runs:
                    self._runs.pop(number).done.set_exception(RuntimeError(reason))
                case ["cancelled", int(number)]:
                    self._cancelled.discard(number)
                case ["fatal", str(reason)]:
                    ended = f"has ended: {reason}"
        self._process = None
        self._cancelled.clear()
        for run in self._runs.values():
            run.done.set_exception(ConnectionError(f"the process of {self._python} {ended}"))
        self._runs.clear()
