"""How a run ends: one message for a mistake, a traceback for the rest, and an exit that nothing holds up."""

import os
import sys
import time
import traceback

import torch.distributed as dist

from megatron_grpo.parallel.agreement import peer_has_ended
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.utils.errors import GrpoError, speaks_for_host


def run(main) -> None:
    """Call ``main``; a ``GrpoError`` ends the run with one message and exit code 1, anything else with its traceback.

    A mistake that every rank sees is printed by rank 0 alone (by the first process of each host, before the ranks have
    met). One that a single rank sees is printed by that rank, with its number, after it has given rank 0 two seconds to
    speak first. The process leaves at once: the ranks that wait for it in a collective are then ended by torchrun, or
    fail themselves, because the connection is closed, and do so in silence.
    """
    code = 0
    try:
        main()
    except GrpoError as error:
        code = 1
        if _speaks(after_rank_0=True):
            print(f"\n{_program()}: {_who()}error: {error}", file=sys.stderr, flush=True)
    except Exception as error:
        code = 1
        if _speaks(after_rank_0=False):
            gone = peer_has_ended(error)
            what = "another rank has ended: torchrun's report says which, and how" if gone else "unexpected error"
            print(f"\n{_program()}: {_who()}{what}", file=sys.stderr)
            traceback.print_exc()
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0 and dist.is_initialized():
        dist.barrier(group=host_group())
        dist.destroy_process_group()
    # Engines leave threads and child processes that would hold the interpreter's exit up.
    os._exit(code)


def _program() -> str:
    return os.path.basename(sys.argv[0])


def _who() -> str:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return f"[rank {rank}] " if world > 1 and rank > 0 else ""


def _speaks(after_rank_0: bool) -> bool:
    """Whether this rank says what went wrong: the first that claims it, since the others fail because it has left."""
    if not dist.is_initialized():
        return speaks_for_host()
    if after_rank_0 and dist.get_rank() > 0:
        time.sleep(2.0)
    try:
        return dist.distributed_c10d._get_default_store().add("megatron_grpo/error", 1) == 1
    except RuntimeError:  # the store went with rank 0, which has spoken
        return False
