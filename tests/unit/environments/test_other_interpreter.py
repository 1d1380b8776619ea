"""Agent programs under an interpreter of their own: values, errors, runs side by side, a process that ends."""

import asyncio
import sys
import venv

import pytest

from megatron_grpo.environments.agent import load
from megatron_grpo.environments.libraries.interpreter import Interpreter
from megatron_grpo.utils.errors import GrpoError

PROGRAM = """
import asyncio, os, sys

seen = asyncio.Event()

async def run(base_url, row, **metadata):
    print("said on stdout")
    if row["do"] == "wait":
        await seen.wait()
    elif row["do"] == "go":
        seen.set()
    elif row["do"] == "raise":
        raise OSError("no connection")
    elif row["do"] == "object":
        return object()
    elif row["do"] == "end":
        os._exit(3)
    elif row["do"] == "hang":
        open(row["file"] + " begun", "w").close()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            open(row["file"], "w").close()
            raise
    return {"prefix": float(sys.prefix == row["prefix"]), "url": float(base_url == "http://x")}

def plain(base_url, row, **metadata):
    return len(metadata["model"])
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """Return (python of a bare virtual environment, its prefix, file of the programs)."""
    directory = tmp_path_factory.mktemp("own")
    venv.create(directory / "venv", symlinks=True)
    (directory / "program.py").write_text(PROGRAM)
    return str(directory / "venv/bin/python"), str(directory / "venv"), str(directory / "program.py")


def test_runs(interpreter, tmp_path):
    python, prefix, file = interpreter
    program = Interpreter(python, f"{file}:run")
    program.check()

    def run(do, **row):
        return program.run("http://x", {"do": do, "prefix": prefix, "file": str(tmp_path / "file")} | row, model="m")

    async def all_runs():
        # The first one ends only after the second.
        assert await asyncio.gather(run("wait"), run("go")) == [{"prefix": 1.0, "url": 1.0}] * 2
        with pytest.raises(RuntimeError, match="OSError: no connection"):
            await run("raise")
        with pytest.raises(RuntimeError, match="not JSON serializable"):
            await run("object")
        with pytest.raises(ConnectionError, match="has ended"):
            await asyncio.gather(run("end"))
        assert (await run("go"))["prefix"] == 1.0  # a new process
        hangs = asyncio.create_task(run("hang"))
        while not (tmp_path / "file begun").exists():  # a run that is cancelled before it begins notices nothing
            await run("go")
        hangs.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hangs
        while not (tmp_path / "file").exists():
            await run("go")

    asyncio.run(all_runs())
    other = Interpreter(python, f"{file}:plain")
    assert asyncio.run(other.run("http://x", {}, model="four")) == 4


def test_refusals(interpreter):
    python, _, file = interpreter
    for name, under, message in (
        (f"{file}:nothing", python, "has no attribute 'nothing'"),
        ("no_module_of_that_name:run", python, "No module named 'no_module_of_that_name'"),
        ("verifiers:wordle", python, "No module named 'verifiers'"),
        (f"{file}:run", "/no/python", "no such program"),
        (f"{file}:run", "true", "no report"),
    ):
        with pytest.raises(GrpoError, match=message):
            load(f"{name} under {under}")
    assert sys.prefix not in python
