"""What test_watchdog.py runs under torchrun: pretrain_grpo.py, one rank of which hangs.

torchrun --nproc-per-node W tests/distributed/hanging_worker.py RANK KIND FLAGS

KIND: `stopped` in the backward pass of the third update, `locked` there with Python's lock, `engine` in a step of the
second rollout, or `slow`, which hangs nowhere: each step of the engine takes 0.2 s.
"""

import ctypes
import itertools
import os
import signal
import sys
import time

import pretrain_grpo
from megatron_grpo.rollout.megatron.engine import MegatronEngine
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils import progress

FOREVER = 10**6


def main() -> None:
    rank, kind = sys.argv.pop(1), sys.argv.pop(1)
    if rank == os.environ["RANK"]:
        backward, steps = itertools.count(1), itertools.count(1)
        step, poll = progress.step, MegatronEngine._poll

        def hanging_step(name: str) -> None:
            step(name)
            if name == "backward" and next(backward) == 3 and kind in ("stopped", "locked"):
                if kind == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                ctypes.PyDLL(None).sleep(FOREVER)  # PyDLL keeps Python's lock

        def hanging_poll(engine):
            if kind == "slow":
                time.sleep(0.2)
            elif kind == "engine" and next(steps) == 8:
                time.sleep(FOREVER)
            return poll(engine)

        progress.step, MegatronEngine._poll = hanging_step, hanging_poll
    pretrain_grpo.main()


if __name__ == "__main__":
    run(main)
