"""An agent program under another interpreter (--agent-python): a process beside each environment worker runs it."""

import asyncio
import itertools
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.utils.errors import GrpoError

_PROCESS = Path(__file__).with_name("process.py")
_LONGEST = 2**28  # bytes of a reply


class Interpreter:
    """Runs the agent program ``name`` under ``python``; a process that has ended is started again by the next run."""

    def __init__(self, python: str, name: str):
        self._python, self._name = python, name
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._runs: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._reads: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Load the program once; GrpoError if the interpreter cannot."""
        if shutil.which(self._python) is None:
            raise GrpoError(f"--agent-python {self._python}: no such program")
        done = subprocess.run([self._python, _PROCESS, self._name], input=b"", stdout=subprocess.PIPE)
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
        done = self._runs[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(process, ["run", number, base_url, row, metadata])
            return await done
        except asyncio.CancelledError:
            await self._send(process, ["cancel", number])
            raise
        finally:
            self._runs.pop(number, None)

    async def _start(self) -> asyncio.subprocess.Process:
        process = self._process = await asyncio.create_subprocess_exec(
            self._python,
            str(_PROCESS),
            self._name,
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
                case ["value", int(number), content] if number in self._runs:
                    self._runs.pop(number).set_result(content)
                case ["failed", int(number), str(reason)] if number in self._runs:
                    self._runs.pop(number).set_exception(RuntimeError(reason))
                case ["fatal", str(reason)]:
                    ended = f"has ended: {reason}"
        self._process = None
        for done in self._runs.values():
            done.set_exception(ConnectionError(f"the process of {self._python} {ended}"))
        self._runs.clear()
