"""Roles of the ranks of one launch: trainers first, then the ranks of the engine replicas (``--rollout-ranks``).

Each role has a default process group of its own: that of megatron-core has the trainers only, and that of vLLM the
ranks of one replica. The environment of torchrun stays as it is: RANK names a rank of the launch in messages, and
LOCAL_RANK is the index of the rank's device.
"""

from argparse import Namespace
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo.utils.errors import GrpoError, rebuilt


@dataclass(frozen=True)
class Role:
    """Role of a rank of the launch, its rank among those of its role, and their number."""

    replica: int | None  # of the engine; None: a trainer
    rank: int
    size: int

    @property
    def name(self) -> str:
        """Name of the role, equal on its ranks only."""
        return "trainers" if self.replica is None else f"replica {self.replica}"


@dataclass(frozen=True)
class Joint:
    """What connects the roles of a launch, on one of its ranks."""

    role: Role
    rank: int  # in the launch: trainers first
    num_replicas: int
    store: dist.Store
    group: Any  # gloo's, of all ranks; torch's stubs do not say that it is a ProcessGroup
    weights: Any  # of all ranks, too; NCCL on GPUs

    @property
    def trainers(self) -> int:
        """Number of trainer ranks."""
        role = self.role
        return role.size if role.replica is None else self.rank - role.replica * role.size - role.rank


def role_of(rank: int, world_size: int, rollout_ranks: int, width: int) -> Role:
    """Return the role of a rank: the last ``rollout_ranks`` are replicas of ``width`` consecutive ranks."""
    trainers = world_size - rollout_ranks
    if rank < trainers:
        return Role(None, rank, trainers)
    return Role((rank - trainers) // width, (rank - trainers) % width, width)


def check_same_split(rollout_ranks: int, store: dist.Store, rank: int) -> None:
    """Raise GrpoError if rank 0 has another number of engine ranks."""
    if rank == 0:
        store.set("rollout_ranks", str(rollout_ranks))
    elif (first := of_rank_0(store)) != rollout_ranks:
        raise GrpoError(
            f"--rollout-ranks is {rollout_ranks} on rank {rank} and {first} on rank 0: give all hosts the same flags"
        )


def of_rank_0(store: dist.Store) -> int:
    """Wait for rank 0's --rollout-ranks and return it; GrpoError if rank 0 has refused the run."""
    text = store.get("rollout_ranks").decode()
    if not text.isdigit():
        raise rebuilt(text)
    return int(text)


def connect(args: Namespace, role: Role, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Joint:
    """Return the connection of all roles. Collective over all ranks of the launch."""
    replicas = args.rollout_ranks // args.vllm_tensor_parallel_size
    group = dist.ProcessGroupGloo(dist.PrefixStore("joint", store), rank, world_size, timeout)
    over_servers = args.vllm_mode == "server"  # the engine ranks have no GPU
    weights = _device_group(dist.PrefixStore("weights", store), rank, world_size, timeout, over_servers)
    return Joint(role, rank, replicas, dist.PrefixStore("control", store), group, weights)


def _device_group(store: dist.Store, rank: int, size: int, timeout: timedelta, on_host: bool = False) -> Any:
    if on_host or not torch.cuda.is_available():
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    return dist.ProcessGroupNCCL(store, rank, size, nccl_options(timeout))


def nccl_options(timeout: timedelta) -> Any:
    """Return the settings of the group that sends weights.

    NCCL's kernels go before others: copies of one round of a sync fill a GPU, and those of the next could not begin.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout, options.is_high_priority_stream = timeout, True
    return options
