"""Weights to SGLang servers of this host by handles of the GPU's memory (CUDA IPC).

What is sent is where the tensors lie; a server maps them and copies (``/update_weights_from_tensor``). There is no
process group, so a server may have the trainer's own GPU, on which NCCL would refuse a second rank.
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
_DEVICE = 6  # its place among the arguments of torch's rebuild_cuda_tensor


class SglangIpcTransfer:
    """``--rollout-engine sglang --weight-sync-method ipc``: tensors in buckets of ``BUCKET_BYTES`` and one more."""

    def send(self, weights: Weights, version: int, servers: ServerPool) -> None:
        for bucket in buckets(weights, BUCKET_BYTES):
            self._lend(bucket, servers)
            if torch.cuda.is_available():  # not in tests
                torch.cuda.ipc_collect()  # takes the block back, now that nobody has it mapped
        servers.give_weights(version)

    def _lend(self, bucket: Bucket, servers: ServerPool) -> None:
        # Copied: a parameter's own memory, once shared, could not be moved to the host any more.
        block = in_one_block(bucket)
        torch.cuda.current_stream().synchronize()

        async def receive(server: Server) -> None:
            # A handle counts who uses it, so each of the server's ranks has its own.
            ranks = [handles(block) for _ in range(server.tensor_parallel_size)]
            body = {"serialized_named_tensors": ranks, "flush_cache": False}
            await server.call("POST", "/update_weights_from_tensor", body, servers.timeout)

        servers.each(receive)

    def close(self) -> None:
        """Nothing: what was shared goes with each bucket."""


def in_one_block(bucket: Bucket) -> Bucket:
    """Copies that lie side by side, so that a server maps one piece of memory and not one a tensor."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for _, tensor in bucket]
    block = torch.empty(sum(sizes), dtype=torch.uint8, device=bucket[0][1].device)
    pieces = zip(bucket, block.split(sizes), strict=True)
    return [(name, piece[: t.nbytes].view(t.dtype).view(t.shape).copy_(t)) for (name, t), piece in pieces]


def handles(bucket: Bucket) -> str:
    """Where the tensors lie, as SGLang's MultiprocessingSerializer writes it."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(bucket)
    return base64.b64encode(buffer.getvalue()).decode()


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        """A GPU is named by its UUID, since it may have another number in the server."""
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
