"""Message about a rank that a signal ends: the process itself cannot print one."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_grpo.checkpointing.checkpoint_directory import newest_in_words
from megatron_grpo.observability.run_status import mark_stopped
from megatron_grpo.utils.errors import read_error_file, record_for_torchrun, write_error_file
from megatron_grpo.utils.process_tree import fork_rank, launcher_process

CAUSES = {
    signal.SIGKILL: "the kernel sends it when the memory of the host or of the container is exhausted (see `dmesg`): "
    "leave out --offload-model and --offload-optimizer, lower --reward-workers, or give the job more memory",
    signal.SIGILL: "the processor, or the virtual machine, lacks an instruction of a package: on a CPU leave out --bf16"
    " and --vllm-dtype bfloat16, whose kernels need AMX where the processor names it",
    signal.SIGBUS: "the kernel sends it when shared memory is full: enlarge /dev/shm (`docker run --shm-size`)",
}
NATIVE = "a fault in native code, such as CUDA, NCCL or an extension: its message is above, if it printed one"


def report_signals(words: Sequence[str]) -> None:
    """Continue in a forked process, the rank; this process reports a signal that ends the rank.

    The message has cause and cure, and is part of torchrun's report. Without torchrun's error file the function does
    nothing. ``words``: the command line, for --save.
    """
    if not os.environ.get("TORCHELASTIC_ERROR_FILE") or sys.platform != "linux":
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--save")
    save, file = parser.parse_known_args(words)[0].save, Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    _write_in_advance(save, file)
    fork_rank(partial(_withdraw, file), partial(_recorded, save), partial(_report, save))


def _write_in_advance(save: str | None, file: Path) -> None:
    """Write what torchrun is to report if SIGKILL ends this process: a link, in contrast to a recorded error."""
    resume = f"--load {save} resumes from its newest checkpoint" if save else newest_in_words(None)
    message = (
        f"SIGKILL ended process {os.getpid()}, the parent of rank {os.environ['RANK']}, which began at the time above: "
        f"`kill -9`, or a scheduler. {resume}"
    )
    in_advance = file.with_name("in_advance.json")
    write_error_file(in_advance, message)
    if in_advance.exists():
        with contextlib.suppress(OSError):  # a file system without links
            file.symlink_to(in_advance.name)


def _withdraw(file: Path) -> None:
    if file.is_symlink():
        file.unlink()


def _report(save: str | None, process: int, number: signal.Signals | None, passed_on: bool) -> None:
    """Print the message, unless another rank of this host has recorded an error, which is then the cause.

    The message about a signal to the whole run is printed once for each host. The parent of rank 0 writes the cause
    into status.json, which would say for ever that the run goes on.
    """
    if _recorded(save, process):
        return
    attempt = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1]
    of_run = number is None or passed_on
    if number is None:
        message = "torchrun has ended, and the run with it"
    elif not passed_on:
        message = f"{number.name} ended rank {os.environ['RANK']} (process {process}): {CAUSES.get(number, NATIVE)}"
    elif _another_has_ended():
        message = "torchrun ended the run, because another rank has ended: its report follows"
    else:
        message = f"{number.name} ended the run"
    message += f". {newest_in_words(save)}"
    _mark_stopped(save, process, message)
    if of_run:
        try:
            (attempt / "ended").touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:  # a full disk: print it more than once
            pass
    print(f"\n{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr, flush=True)
    if not of_run:
        record_for_torchrun(message)


def _recorded(save: str | None, process: int) -> bool:
    """Return whether a rank of this host has recorded an error, which is then that of the run."""
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    found = [path for path in file.parents[1].glob(f"*/{file.name}") if not path.is_symlink()]  # of all ranks
    if found:
        _mark_stopped(save, process, read_error_file(min(found, key=lambda path: path.stat().st_mtime)))
    return bool(found)


def _mark_stopped(save: str | None, process: int, error: str) -> None:
    if save and os.environ["RANK"] == "0":
        mark_stopped(Path(save), process, error)


def _another_has_ended() -> bool:
    """Return whether torchrun has fewer child processes than ranks on this host; False if the kernel does not say."""
    launcher, _ = launcher_process()
    children = [pid for file in Path(f"/proc/{launcher}/task").glob("*/children") for pid in file.read_text().split()]
    return 0 < len(children) < int(os.environ["LOCAL_WORLD_SIZE"])
