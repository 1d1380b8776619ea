"""Exit of a run: one message for an error of the user's, a traceback for any other error, and an immediate exit."""

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from megatron_grpo.parallel.agreement import peer_has_ended
from megatron_grpo.parallel.initialize import host_group, joint
from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import GrpoError, Preempted, of_file, prints_for_host, record_for_torchrun
from megatron_grpo.utils.launch import rank
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.utils.process_tree import end_with_launcher

_last_steps: list[Callable[[], None]] = []


def before_exit(step: Callable[[], None]) -> None:
    """Have `run` call ``step`` just before the process ends, after an error too; it must neither hang nor raise.

    The last step that was given is called first.
    """
    _last_steps.append(step)


def run(main) -> None:
    """Call ``main``; a ``GrpoError`` ends the run with one message and exit code 1, any other error with its traceback.

    A file without permission ends it with one message, too.

    If every rank fails, only rank 0 prints the error (without a process group, the first process of each host). If one
    rank fails, this rank prints the error with its number two seconds later, so that rank 0 prints first. The process
    exits at once. torchrun ends the ranks that wait for this rank in a collective, or they fail because the connection
    is closed; they print nothing. The printed message is the root cause in torchrun's report.
    """
    end_with_launcher()
    gc.freeze()  # no garbage collection goes over the imported objects again
    gc.enable()
    code = 0
    try:
        main()
    except Preempted as error:
        print_rank_0(f"left the rollout: {error}")
    except Exception as error:
        code, raised = 1, time.time()
        message, gone = _in_words(error), peer_has_ended(error)
        progress.error = message or f"{type(error).__name__}: {error}"
        if not _prints_error(after_rank_0=message is not None):
            _let_cause_end_first()
        elif message is not None:
            details = getattr(error, "details", "")
            above = f"\n{details.rstrip()}" if details else ""
            print(f"{above}\n{_program_name()}: {_rank_prefix()}error: {message}", file=sys.stderr, flush=True)
            record_for_torchrun(message, seconds=raised)
        else:
            what = "another rank has ended: see torchrun's report of that rank" if gone else "unexpected error"
            print(f"\n{_program_name()}: {_rank_prefix()}{what}", file=sys.stderr)
            if not gone or not os.environ.get("TORCHELASTIC_ERROR_FILE"):
                traceback.print_exc()
            if gone:  # torchrun has one report per host: this is the cause only on a host where no rank ended earlier
                _let_cause_end_first()
            record_for_torchrun(str(error), traceback.format_exc())
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0 and dist.is_initialized():
        dist.barrier(group=host_group())
        dist.destroy_process_group()
    for step in reversed(_last_steps):
        step()
    # Threads and child processes of engines, such as a thread in a blocked NCCL call, would block sys.exit.
    os._exit(code)


def _in_words(error: Exception) -> str | None:
    """Return the message of an error that the user can correct; None for another error, which needs its traceback."""
    if isinstance(error, PermissionError) and error.filename is not None:
        return of_file(error)
    return str(error) if isinstance(error, GrpoError) else None


def _let_cause_end_first() -> None:
    """Wait until torchrun has seen the rank with the cause: the rank that it sees first is its root cause."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stderr.flush()
        time.sleep(2.0)


def _program_name() -> str:
    return os.path.basename(sys.argv[0])


def _rank_prefix() -> str:
    return f"[rank {rank()}] " if rank() > 0 else ""


def _prints_error(after_rank_0: bool) -> bool:
    """Return whether this rank prints its error: only the first rank does, because the others fail as a consequence."""
    if not dist.is_initialized():
        return prints_for_host()
    if after_rank_0 and dist.get_rank() > 0:
        time.sleep(2.0)
    roles = joint()
    try:
        store = dist.distributed_c10d._get_default_store() if roles is None else roles.store
        return store.add("megatron_grpo/error", 1) == 1
    except RuntimeError:  # the store ended with rank 0, which has printed its error
        return False
