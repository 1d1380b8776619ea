"""Exceptions that end a run with one message, the process that prints it, and its copy for torchrun's report."""

import json
import os
import sysconfig
import time
import traceback
from pathlib import Path


class GrpoError(Exception):
    """An error that the user can correct: the message has the cause and the cure; the run ends with exit code 1."""

    details = ""  # lines to print above the message, such as the traceback of a function of the user's


class InputError(GrpoError):
    """An error of a file that is read. What is written meanwhile is not at fault, and is not named in the message."""


class EngineLost(GrpoError):
    """The loss of the last inference engine, raised on every rank.

    The run saves a checkpoint as of before the rollout, if the device answers, and ends as with any ``GrpoError``.
    """

    saved = False  # True if the run's newest checkpoint holds its newest update


class Preempted(EngineLost):
    """The end of a rollout by a signal, raised on every rank; the run saves as after a loss and exits with code 0."""


def raised_at(error: BaseException) -> str:
    """Return ", FILE, line N" of the user's code that raised an error or called what raised it; "" without any."""
    others = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return f", {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def of_file(error: OSError) -> str:
    """Return the message of an error of a file, with its name."""
    if error.filename is None:
        return str(error)
    if isinstance(error, PermissionError):
        return f"{error.filename}: permission denied: correct the mode of it and of its folders, or give another"
    return f"{error.filename}: {error.strerror}"


def rebuilt(text: str) -> "GrpoError":
    """Return the error of another rank, which that rank has written by `described`."""
    kind, _, message = text.partition("\n")
    kinds: dict[str, type[GrpoError]] = {one.__name__: one for one in (EngineLost, Preempted)}
    return kinds.get(kind, GrpoError)(message)


def described(error: GrpoError) -> str:
    """Return kind and message of an error, for other ranks."""
    return f"{type(error).__name__}\n{error}"


# Texts of CUDA, cuBLAS and vLLM for a GPU without enough free memory.
EXHAUSTED = "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Free memory on device", "No available memory for the cache"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or the error that caused it, is for want of memory on the GPU."""
    while error is not None:
        if isinstance(error, (RuntimeError, ValueError)) and any(text in str(error) for text in EXHAUSTED):
            return True
        error = error.__cause__
    return False


def prints_for_host() -> bool:
    """Return whether this process prints an error that all processes of its host have; only local rank 0 does.

    The other processes wait 30 seconds: torchrun ends all processes when one exits, which would cut off the message.
    """
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        return True
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(30)
    return False


def record_for_torchrun(message: str, call_stack: str = "", seconds: float | None = None) -> None:
    """Write the error file of this worker, which torchrun shows in its report; do nothing without torchrun.

    torchrun's root cause is the worker with the earliest time. ``seconds``: time of the error since the epoch [now].
    torchrun shows ``call_stack`` in place of the message, if there is one.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        write_error_file(Path(file), message, call_stack, seconds)


def read_error_file(file: Path) -> str:
    """Return the message of a file that `write_error_file` has written; "" for any other."""
    try:
        return str(json.loads(file.read_text())["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def write_error_file(file: Path, message: str, call_stack: str = "", seconds: float | None = None) -> None:
    """Write a file for `record_for_torchrun`; on a full disk, write nothing."""
    extra = {"timestamp": str(int(time.time() if seconds is None else seconds))}
    if call_stack:
        extra["py_callstack"] = call_stack
    part = file.with_suffix(".part")  # torchrun ends with a JSONDecodeError if it reads half a file
    try:
        part.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        os.replace(part, file)
    except OSError:
        part.unlink(missing_ok=True)
