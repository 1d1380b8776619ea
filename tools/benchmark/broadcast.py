"""Measure the NCCL transfer of packed weights from one GPU to another, as in a weight sync to a vLLM server.

    torchrun --nproc-per-node 2 tools/benchmark/broadcast.py --model-family qwen3 ... --bf16

No server is started. The flags of pretrain_grpo.py set the model's architecture. Rank 0 packs random tensors, as
`--weight-sync-method nccl` does; rank 1 unpacks them with vLLM's code and copies each one to its parameter. A plain
peer-to-peer copy is measured for comparison.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_up
import torch
import torch.distributed as dist

from megatron_grpo.parallel.initialize import free_port, initialize_distributed
from megatron_grpo.rollout.weight_sync.nccl import PACKED, send_packed
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.weights.stream import describe


def best_of(work, repeats: int = 4) -> float:
    """Return the seconds of the fastest of ``repeats`` calls on all ranks, after one warm-up call."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flags = parser.parse_known_args()[1]
    args = made_up.parse(["--use-distributed-optimizer", *flags], world_size=2)
    initialize_distributed(args)
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    rank, port = dist.get_rank(), [free_port()]
    dist.broadcast_object_list(port, src=0)
    group = PyNcclCommunicator(StatelessProcessGroup.create("127.0.0.1", port[0], rank, 2), device=rank)
    tensors = {t.name: torch.randn(t.shape, dtype=t.dtype, device="cuda") for t in describe(args)}
    size = sum(tensor.nbytes for tensor in tensors.values())

    def take(pairs) -> None:
        for name, tensor in pairs:
            tensors[name].copy_(tensor)

    def transfer() -> None:
        if rank == 0:
            send_packed(iter(tensors.items()), group)
            return
        packed_nccl_broadcast_consumer(
            ((name, (list(tensor.shape), tensor.dtype)) for name, tensor in tensors.items()),
            group=group,
            src=0,
            post_unpack_func=take,
            buffer_size_bytes=PACKED["packed_buffer_size_bytes"],
            num_buffers=PACKED["packed_num_buffers"],
        )

    def copy() -> None:
        if rank == 0:
            target.copy_(block)
            torch.cuda.synchronize(1)

    block = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(block, device="cuda:1")
    print_rank_0("| | GB | s | GB/s |\n|---|--:|--:|--:|")
    for name, work in (("packed, unpacked and in place", transfer), ("peer copy", copy)):
        seconds = best_of(work)
        print_rank_0(f"| {name} | {size / 1e9:.2f} | {seconds:.4f} | {size / 1e9 / seconds:.0f} |")


if __name__ == "__main__":
    run(main)
