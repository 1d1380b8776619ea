"""What test_watchdog.py and test_restart.py run under torchrun: pretrain_grpo.py, one rank of which is disturbed once.

torchrun --nproc-per-node W tests/distributed/disturbed_worker.py RANK KIND FLAGS

KIND: in the backward pass of the third update `stopped`, `locked` with Python's lock, or `killed`; in the eighth step
of the engine, `engine` blocks, and `signal` is SIGTERM to the rank itself; `deaf` is both. `slow`: each step of the
engine takes 0.2 s. `nan`: the third update has a gradient that is not finite. The file `disturbed` in --save keeps a
second start from the same. As soon as it exists, the watchdog's limits are two seconds on every rank that still runs.
"""

import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pretrain_grpo
from megatron_grpo.observability.watchdog import Watchdog
from megatron_grpo.rollout.megatron.engine import MegatronEngine
from megatron_grpo.training import train_step
from megatron_grpo.training.early_exit import EarlyExit
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils import progress

FOREVER = 10**6


def main() -> None:
    rank, kind = sys.argv.pop(1), sys.argv.pop(1)
    save = Path(sys.argv[sys.argv.index("--save") + 1])
    publish = Watchdog._publish

    def publish_with_short_limits(watchdog):
        if (save / "disturbed").exists():
            watchdog.limits = dict.fromkeys(watchdog.limits, 2.0)
        publish(watchdog)

    Watchdog._publish = publish_with_short_limits
    if rank == os.environ["RANK"] and not (save / "disturbed").exists():
        backward, steps = itertools.count(1), itertools.count(1)
        step, poll = progress.step, MegatronEngine._poll
        noted, note = threading.Event(), EarlyExit._note

        def noting(early_exit, number) -> None:
            note(early_exit, number)
            noted.set()

        EarlyExit._note = noting

        def disturbed_step(name: str) -> None:
            step(name)
            if name == "backward" and next(backward) == 3 and kind in ("stopped", "locked", "killed"):
                (save / "disturbed").touch()
                if kind != "locked":
                    os.kill(os.getpid(), signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
                ctypes.PyDLL(None).sleep(FOREVER)  # PyDLL keeps Python's lock

        def disturbed_poll(engine):
            if kind == "slow":
                time.sleep(0.2)
            elif kind in ("engine", "signal", "deaf") and next(steps) == 8:
                (save / "disturbed").touch()
                if kind != "engine":
                    signal.raise_signal(signal.SIGTERM)  # to this thread: another one could run late
                    noted.wait()  # by the thread that reads signals, before the rollout is over
                if kind != "signal":
                    time.sleep(FOREVER)
            return poll(engine)

        progress.step, MegatronEngine._poll = disturbed_step, disturbed_poll
        if kind == "nan":
            whole, updates = train_step.finalize_model_grads, itertools.count(1)

            def finalize(model, *arguments, **options):
                if next(updates) == 3:
                    model[0].buffers[0].grad_data[0] = float("nan")
                whole(model, *arguments, **options)

            train_step.finalize_model_grads = finalize
    pretrain_grpo.main()


if __name__ == "__main__":
    run(main)
