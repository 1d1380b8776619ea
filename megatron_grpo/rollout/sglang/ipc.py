"""Weight sync to SGLang servers on this host through handles of GPU memory (CUDA IPC).

The trainer sends memory handles; a server maps the memory and copies the tensors (``/update_weights_from_tensor``).
There is no process group, so a server can share the trainer's GPU, on which NCCL would refuse a second rank.
"""

import base64
import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from megatron_grpo.rollout.servers.engine import Weights
from megatron_grpo.rollout.servers.pool import ServerPool
from megatron_grpo.rollout.servers.server import Server
from megatron_grpo.rollout.weight_sync.transfer import Bucket, buckets

BUCKET_BYTES = 2**30
_ALIGNMENT = 256  # bytes
_DEVICE = 6  # index of the device in the arguments of torch's rebuild_cuda_tensor


class SglangIpcTransfer:
    """Weight transfer of ``--rollout-engine sglang --weight-sync-method ipc``.

    A bucket has at most ``BUCKET_BYTES`` bytes plus one tensor.
    """

    def send(self, weights: Weights, version: int, servers: ServerPool) -> None:
        for bucket in buckets(weights, BUCKET_BYTES):
            self._share(bucket, servers)
            if torch.cuda.is_available():  # tests run on a CPU
                torch.cuda.ipc_collect()  # frees the block, which no server maps any more
        servers.update_servers(version)

    def _share(self, bucket: Bucket, servers: ServerPool) -> None:
        # Share a copy: a parameter with shared memory could not be offloaded to the host any more.
        block = in_one_block(bucket)
        torch.cuda.current_stream().synchronize()

        async def receive(server: Server) -> None:
            # A handle counts its users, so each rank of the server needs its own.
            ranks = [handles(block) for _ in range(server.tensor_parallel_size)]
            body = {"serialized_named_tensors": ranks, "flush_cache": False}
            await server.call("POST", "/update_weights_from_tensor", body, servers.timeout)

        servers.each(receive)

    def close(self) -> None:
        """Do nothing: each bucket frees its shared memory."""


def in_one_block(bucket: Bucket) -> Bucket:
    """Return contiguous copies, so that a server maps one block of memory instead of one per tensor."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for _, tensor in bucket]
    block = torch.empty(sum(sizes), dtype=torch.uint8, device=bucket[0][1].device)
    pieces = zip(bucket, block.split(sizes), strict=True)
    return [(name, piece[: t.nbytes].view(t.dtype).view(t.shape).copy_(t)) for (name, t), piece in pieces]


def handles(bucket: Bucket) -> str:
    """Return the memory handles of the tensors in the format of SGLang's MultiprocessingSerializer."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(bucket)
    return base64.b64encode(buffer.getvalue()).decode()


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        """Replace the GPU's number by its UUID, because the server may number GPUs differently."""
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
