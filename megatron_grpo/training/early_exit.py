"""Ends of a run before its last update that come from outside: its time is up, or it gets SIGTERM."""

import signal
import time

import torch
import torch.distributed as dist

from megatron_grpo.parallel.initialize import host_group


class EarlyExit:
    """Whether the run is to be saved and left, asked between rollouts by all ranks together.

    --exit-duration-in-mins counts from here, so all but the imports; --exit-signal-handler takes SIGTERM from here on,
    and a rank that gets it is enough. Names and meaning: Megatron-LM's.
    """

    def __init__(self, duration_in_mins: float | None, on_signal: bool):
        self._limit = None if duration_in_mins is None else time.monotonic() + 60 * duration_in_mins
        self._signalled = False
        self._asked = on_signal or self._limit is not None
        if on_signal:
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number, frame) -> None:
        self._signalled = True

    def reason(self) -> str | None:
        """Why the run ends now, the same on every rank, each of which must call it; None to go on."""
        if not self._asked:
            return None
        late = self._limit is not None and time.monotonic() >= self._limit
        votes = torch.tensor([self._signalled, late], dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=host_group())
        if votes[0]:
            return "SIGTERM (--exit-signal-handler)"
        return "--exit-duration-in-mins is over" if votes[1] else None
