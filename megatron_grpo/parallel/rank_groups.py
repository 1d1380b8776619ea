"""Process groups beside those of the policy: of a second parallel configuration, and of an engine's replicas."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_grpo.parallel.initialize import host_group, initialize_model_parallel
from megatron_grpo.patches import megatron_core as core


class RankGroups:
    """megatron-core's process groups for other parallel sizes than the policy's, active only within `entered`."""

    def __init__(self, args: Namespace):
        self._state: dict[str, object] = dict.fromkeys(core.parallel_state()) | {"_HYBRID_DP_CP_GROUPS": {}}
        with core.replaced_parallel_state(self._state):
            initialize_model_parallel(args)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Activate these groups: within the context ``megatron.core.parallel_state`` returns them."""
        with core.replaced_parallel_state(self._state):
            yield


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
