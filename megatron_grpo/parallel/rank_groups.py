"""Process groups beside those of the policy: of a second parallel configuration, and of an engine's replicas."""

import contextlib
import re
from argparse import Namespace
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo.parallel.initialize import host_group, initialize_model_parallel


class RankGroups:
    """megatron-core's process groups for other parallel sizes than the policy's, active only within `entered`."""

    def __init__(self, args: Namespace):
        outer = _globals()
        vars(parallel_state).update(dict.fromkeys(outer), _HYBRID_DP_CP_GROUPS={})
        try:
            initialize_model_parallel(args)
        finally:
            self._state = _globals()
            vars(parallel_state).update(outer)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Activate these groups: within the context ``megatron.core.parallel_state`` returns them."""
        outer = _globals()
        vars(parallel_state).update(self._state)
        try:
            yield
        finally:
            self._state = _globals()  # a forward pass creates buffers and sets the virtual stage
            vars(parallel_state).update(outer)


def _globals() -> dict[str, object]:
    """Return the module-level variables that hold the state of ``megatron.core.parallel_state``."""
    return {name: value for name, value in vars(parallel_state).items() if re.fullmatch("_[A-Z_]+", name)}


def replica_group(replica: int, num_replicas: int, backend: str | None = None) -> dist.ProcessGroup | None:
    """Return the process group of the ranks of this rank's engine replica; None if a replica has one rank. Collective.

    The ``backend`` is the device's, or as given.
    """
    replicas = [torch.empty((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, torch.tensor(replica), group=host_group())
    if len(replicas) == num_replicas:
        return None
    of = [int(number) for number in replicas]
    ranks = [[rank for rank in range(len(of)) if of[rank] == number] for number in range(num_replicas)]
    return [dist.new_group(own, backend=backend) for own in ranks][replica]
