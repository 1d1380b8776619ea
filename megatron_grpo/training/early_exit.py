"""Early end of a run: after a time limit, or on SIGTERM."""

import signal
import time

import torch
import torch.distributed as dist

from megatron_grpo.parallel.initialize import host_group


class EarlyExit:
    """Conditions under which the run is saved and ended after a rollout, equal on all ranks.

    --exit-duration-in-mins counts from the construction of this object, so it does not include the imports.
    --exit-signal-handler ends the run if any rank receives SIGTERM. The flags are Megatron-LM's.
    """

    def __init__(self, duration_in_mins: float | None, on_signal: bool):
        self._limit = None if duration_in_mins is None else time.monotonic() + 60 * duration_in_mins
        self._signalled = False
        self._enabled = on_signal or self._limit is not None
        if on_signal:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number, frame) -> None:
        self._signalled = True

    def reason(self) -> str | None:
        """Return the reason to end the run now, or None; equal on all ranks. Collective."""
        if not self._enabled:
            return None
        late = self._limit is not None and time.monotonic() >= self._limit
        votes = torch.tensor([self._signalled, late], dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=host_group())
        if votes[0]:
            return "SIGTERM (--exit-signal-handler)"
        return "--exit-duration-in-mins is over" if votes[1] else None
