"""Weight sync to SGLang servers over NCCL: one broadcast per tensor, in a process group of rank 0 and all servers.

Written from SGLang's sources (``init_weights_update_group``, ``update_weights_from_distributed``); tested with SGLang
0.5.15 on GPUs with NCCL, and on a CPU with gloo.
"""

import contextlib
import datetime

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_grpo.parallel.initialize import free_port
from megatron_grpo.rollout.servers.engine import Weights
from megatron_grpo.rollout.servers.pool import ServerPool
from megatron_grpo.rollout.servers.server import Server
from megatron_grpo.rollout.weight_sync.nccl import PEER_TIMEOUT, address_for, exchange
from megatron_grpo.rollout.weight_sync.transfer import Bucket, buckets
from megatron_grpo.utils.http_client import Fault

GROUP = "megatron_grpo_weights"
BUCKET_BYTES = 2**30


class SglangNcclTransfer:
    """Weight transfer of ``--rollout-engine sglang --weight-sync-method nccl``.

    A bucket has at most ``BUCKET_BYTES`` bytes plus one tensor.
    """

    def __init__(self, backend: str = "nccl"):
        self._backend = backend
        self._group: dist.ProcessGroup | None = None
        self._members: list[tuple[str, str]] = []

    def send(self, weights: Weights, version: int, servers: ServerPool) -> None:
        for bucket in buckets(weights, BUCKET_BYTES):
            self._broadcast([(name, tensor.contiguous()) for name, tensor in bucket], servers)
        servers.update_servers(version)
        self._members = servers.members()

    def _join(self, servers: ServerPool) -> None:
        """Form a process group of this rank and all serving servers."""
        members, offsets, world_size = servers.members(), {}, 1
        for server in servers.serving():
            offsets[server.url] = world_size
            world_size += server.tensor_parallel_size
        address, port = address_for(list(offsets)), free_port()
        # Longer than the time-out of `exchange`.
        timeout = datetime.timedelta(seconds=servers.timeout + 2 * PEER_TIMEOUT)
        body = {
            "master_address": address,
            "master_port": port,
            "world_size": world_size,
            "group_name": GROUP,
            "backend": self._backend,
        }

        async def join(server: Server) -> None:
            with contextlib.suppress(Fault):  # the server has no group of an earlier run or of other members
                await server.call("POST", "/destroy_weights_update_group", {"group_name": GROUP}, servers.timeout)
            offset = {"rank_offset": offsets[server.url]}
            await server.call("POST", "/init_weights_update_group", body | offset, servers.timeout)

        def join_here() -> None:
            if self._group is not None:
                dist.destroy_process_group(self._group)
            store = dist.TCPStore(address, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
            # As torch's init_process_group, for a second group with other processes than the first.
            self._group, _ = c10d._new_process_group_helper(
                world_size, 0, [], self._backend, dist.PrefixStore(GROUP, store), c10d.GroupName(GROUP), timeout=timeout
            )
            c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}

        exchange(servers, join, join_here)
        self._members = members

    def _broadcast(self, bucket: Bucket, servers: ServerPool) -> None:
        while self._members != servers.members():  # a server failed in this loop or in the last bucket
            self._join(servers)
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": GROUP,
            "flush_cache": False,
        }

        async def receive(server: Server) -> None:
            await server.call("POST", "/update_weights_from_distributed", body, servers.timeout)

        def send() -> None:
            for work in [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for _, tensor in bucket]:
                work.wait()
            torch.cuda.current_stream().synchronize()  # wait() does not block the host

        exchange(servers, receive, send)

    def close(self) -> None:
        """Do nothing: the process group ends with the process."""
