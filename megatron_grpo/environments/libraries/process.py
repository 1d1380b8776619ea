"""Process of ``interpreter.Interpreter``: runs an agent program under --agent-python, without anything of ours.

    PYTHON megatron_grpo/environments/libraries/process.py NAME THREADS

NAME is that of --agent; THREADS programs that are no coroutines run at the same time. JSON lines arrive on stdin,
["run", id, base_url, row, metadata] or ["cancel", id], and leave on stdout: ["ready"] or ["fatal", reason] once, then
["began", id], and ["value", id, value] or ["failed", id, reason] for each run, or ["cancelled", id]. What the program
prints goes to stderr. The process ends with its stdin.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

_MAX_THREADS = 2**16  # with those of programs that were cancelled and go on, which hold no place


def program(name: str) -> Any:
    """Return an async context manager whose value is the agent program."""
    sys.path[0] = ""  # modules are those of the working directory, not of this file's
    if name.startswith("verifiers:"):
        return _file(str(Path(__file__).with_name("of_verifiers.py"))).served(name.partition(":")[2])
    module, _, function = name.rpartition(":")
    found = _file(module) if module.endswith(".py") else importlib.import_module(module)
    return contextlib.nullcontext(getattr(found, function))


def _file(path: str) -> Any:
    # A package of the file's folder: "from .helpers import f" imports helpers.py there.
    package = types.ModuleType("folder of --agent")
    package.__path__ = [os.path.dirname(os.path.abspath(path))]
    sys.modules[package.__name__] = package
    name = os.path.basename(path).removesuffix(".py").replace(".", "_")
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{name}", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def main(name: str, threads: int, tasks: Any, report: Callable[[Any], None]) -> None:
    reader, places = asyncio.StreamReader(limit=2**28), asyncio.Semaphore(threads)
    runs: dict[int, asyncio.Task] = {}
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), tasks)
    try:
        context = program(name)
        run = await context.__aenter__()
    except (Exception, SystemExit) as error:
        report(["fatal", f"{type(error).__name__}: {error}"])
        return
    report(["ready"])

    async def answer(number: int, base_url: str, row: Any, metadata: Any) -> None:
        try:
            if inspect.iscoroutinefunction(run):
                report(["began", number])
                value = await run(base_url, row, **metadata)
            else:
                async with places:
                    report(["began", number])
                    value = await asyncio.to_thread(run, base_url, row, **metadata)
            line = json.dumps(["value", number, value])
        except (Exception, SystemExit) as error:
            line = json.dumps(["failed", number, f"{type(error).__name__}: {error}"])
        report(json.loads(line))

    def ended(number: int, task: asyncio.Task) -> None:
        runs.pop(number, None)

    while line := await reader.readline():
        what, number, *content = json.loads(line)
        if what == "run":
            runs[number] = asyncio.create_task(answer(number, *content))
            runs[number].add_done_callback(partial(ended, number))
            continue
        report(["cancelled", number])
        if number in runs:
            runs[number].cancel()
    for task in list(runs.values()):
        task.cancel()
    await asyncio.wait([asyncio.ensure_future(context.__aexit__(None, None, None))], timeout=10)


if __name__ == "__main__":
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report_line(content: Any) -> None:
        print(json.dumps(content), file=reports, flush=True)

    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.stdin, report_line))
    os._exit(0)  # threads of programs may hang
