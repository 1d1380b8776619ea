"""What tests/gpu/test_weight_transfer.py runs on two GPUs: rank 0 sends weights as to a vLLM server, rank 1 takes them.

torchrun --nproc-per-node 2 tests/gpu/nccl_worker.py
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

from megatron_grpo.parallel.initialize import free_port
from megatron_grpo.rollout.weight_sync.nccl import PACKED, send_packed

SHAPES = [(3, 5), (4096, 4096), (1,), (20000, 4096), (4097, 33), (8192, 8192), (7,)]  # some 400 MB: several buckets


def weights(offset: int, device) -> dict[str, torch.Tensor]:
    """Tensors that are the same on both ranks."""
    return {
        f"layer.{i}": torch.arange(i + offset, i + offset + torch.Size(shape).numel(), device=device)
        .remainder(251)
        .to(torch.bfloat16)
        .view(shape)
        for i, shape in enumerate(SHAPES)
    }


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo")
    port = torch.tensor(free_port())
    dist.broadcast(port, src=0)
    group = StatelessProcessGroup.create(host="127.0.0.1", port=int(port), rank=rank, world_size=2)
    nccl = PyNcclCommunicator(group, device=rank)
    for offset in range(3):  # the buffers are used again
        want = weights(offset, rank)
        if rank == 0:
            sent = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
            torch.cuda._sleep(int(2e8))
            for name, tensor in sent.items():
                tensor.copy_(want[name])
            send_packed(iter(sent.items()), nccl)
        else:
            got: dict[str, torch.Tensor] = {}
            packed_nccl_broadcast_consumer(
                iter((name, (list(tensor.shape), tensor.dtype)) for name, tensor in want.items()),
                group=nccl,
                src=0,
                post_unpack_func=lambda pairs, got=got: got.update((name, tensor.clone()) for name, tensor in pairs),
                buffer_size_bytes=PACKED["packed_buffer_size_bytes"],
                num_buffers=PACKED["packed_num_buffers"],
                device=f"cuda:{rank}",
            )
            torch.cuda.synchronize()
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want), offset
            print(f"received {offset}", flush=True)
        torch.cuda.synchronize()
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # the communicator's threads would hold the exit up


if __name__ == "__main__":
    main()
