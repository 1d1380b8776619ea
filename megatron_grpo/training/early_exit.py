"""Early end of a run: after a time limit, or on SIGTERM and SIGUSR1, with which schedulers announce a preemption."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo.checkpointing.checkpoint_directory import newest_in_words
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.rollout.engine import GeneratingEngine
from megatron_grpo.utils.errors import Preempted
from megatron_grpo.utils.launch import rank
from megatron_grpo.utils.log import print_rank_0

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
MARKER = "preempted"  # file in --save as long as a preempted run has not been started again
MARGIN = 1.2  # a save may take so much longer than the last one
TOLD = "megatron_grpo/leave"  # key of the store once a rank has a signal
STEPS_AHEAD = 4  # engine steps; vLLM queues one before the last one has ended


class EarlyExit:
    """Conditions under which the run is saved and ended, equal on all ranks.

    --exit-duration-in-mins ends it after a rollout's updates. It counts from the construction of this object, so it
    does not include the imports.

    --exit-signal-handler ends it if any rank receives SIGTERM or SIGUSR1: in a rollout, which a resumed run repeats, at
    the next step of the engine (`check_rollout`); else after the rollout's updates. ``grace`` seconds after the signal
    the process exits wherever it is. Rank 0 marks the directory ``save`` at once.
    """

    def __init__(
        self, duration_in_mins: float | None, on_signal: bool, grace: float = 25.0, save: str | Path | None = None
    ):
        self._limit = None if duration_in_mins is None else time.monotonic() + 60 * duration_in_mins
        self.grace, self.save = grace, save
        self._signal: signal.Signals | None = None
        self._deadline = 0.0  # of this rank, once it has a signal
        self._on_signal = on_signal
        self._closed = threading.Event()
        self._steps, self._last_step = 0, sys.maxsize  # of the engine, in all rollouts
        self._next_look = 0.0  # at other ranks' signals
        self._store: dist.Store | None = None
        if on_signal:
            if dist.is_initialized():
                default: Any = dist.distributed_c10d._get_default_store()  # torch's stubs of Store lack clone
                self._store = default.clone()  # a connection of another thread's own
            # Python runs handlers on the main thread, which may be in a collective: this thread reads the signals.
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            for number in SIGNALS:
                signal.signal(number, lambda number, frame: None)
            signal.set_wakeup_fd(writing)
            threading.Thread(target=self._listen, args=(reading,), daemon=True, name="signals").start()

    def _listen(self, pipe: int) -> None:
        while self._signal is None:
            for number in os.read(pipe, 1):
                if number in SIGNALS:
                    self._note(signal.Signals(number))
        if self._closed.wait(max(0.0, self._deadline - time.monotonic())):
            return
        print_rank_0(
            f"{self._signal.name}: the grace of {self.grace:g} s is over (--exit-grace-seconds). "
            f"{newest_in_words(self.save)}"
        )
        os._exit(1)

    def close(self) -> None:
        """End the time limit of a signal: the run has ended."""
        self._closed.set()

    def _note(self, number: signal.Signals) -> None:
        self._deadline = time.monotonic() + self.grace
        self._signal = number
        self.mark(number.name)
        # The main thread may be in a collective that ends when another host's rollout does.
        threading.Thread(target=self._tell, daemon=True, name="tells of a signal").start()

    def _tell(self) -> None:
        """Tell the other ranks of the signal; a lost store ends the run elsewhere."""
        with contextlib.suppress(dist.DistError):
            if self._store is not None:
                self._store.set(TOLD, "")

    def reason(self) -> str | None:
        """Return the reason to end the run now, or None; equal on all ranks. Collective."""
        if not self._on_signal and self._limit is None:
            return None
        late = self._limit is not None and time.monotonic() >= self._limit
        votes = torch.tensor([self._signal or 0, late], dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=host_group())
        if votes[0]:
            self.mark(signal.Signals(int(votes[0])).name)
            return in_words(signal.Signals(int(votes[0])))
        return "--exit-duration-in-mins is over" if votes[1] else None

    def check_rollout(self, engine: GeneratingEngine) -> None:
        """Raise Preempted if a signal of any rank ends this rollout; call this after every step of the engine.

        All ranks of a replica raise after the same step: its lead rank announces the number of the step in the store,
        before the others can have passed it.
        """
        if not self._on_signal or engine.replica is None:
            return
        self._steps += 1
        store = dist.distributed_c10d._get_default_store()
        own = f"megatron_grpo/leave/{engine.replica}"
        if self._last_step < sys.maxsize:
            pass
        elif not engine.is_lead:
            if store.check([own]):
                self._last_step = int(store.get(own))
        elif self._any_signal(store):
            alone = dist.get_world_size() == engine.num_replicas
            self._last_step = self._steps + (0 if alone else STEPS_AHEAD)
            store.set(own, str(self._last_step))
        if self._steps >= self._last_step:
            raise Preempted(in_words(self._signal or signal.SIGTERM))

    def check_wait(self, told: bool) -> None:
        """Raise Preempted on rank 0 for a signal of any rank, while it waits for engines on ranks of their own.

        Other ranks tell it theirs. ``told``: whether an engine's rank has told one.
        """
        if not self._on_signal:
            return
        if (self._any_signal(dist.distributed_c10d._get_default_store()) or told) and dist.get_rank() == 0:
            raise Preempted(in_words(self._signal or signal.SIGTERM))

    def _any_signal(self, store: dist.Store) -> bool:
        """Return whether this rank has a signal, or another one has told so; the store is read once a second."""
        if self._signal is None and time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + 1.0
        return self._signal is not None or store.check([TOLD])

    def mark(self, reason: str) -> None:
        """Write the file that tells a launch script to start the run again; on rank 0 only."""
        if self.save and rank() == 0:
            with contextlib.suppress(OSError):  # a full disk: the file exists, which is enough
                Path(self.save, MARKER).write_text(f"{reason}\n", encoding="utf-8")

    def leaves_time(self, seconds: float) -> bool:
        """Return whether a save ends within the grace; ``seconds``: of the last one, to which `MARGIN` is added."""
        return self._signal is None or time.monotonic() + MARGIN * seconds < self._deadline


def in_words(number: signal.Signals) -> str:
    """Return the reason of a run that ends by a signal."""
    return f"{number.name} (--exit-signal-handler)"


def unmark(save: str | Path) -> None:
    """Delete the file of a preemption."""
    Path(save, MARKER).unlink(missing_ok=True)
