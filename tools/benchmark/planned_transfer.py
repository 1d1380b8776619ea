"""Measure the planned transfer of weights from trainer ranks to engine ranks, without trainer and engine around it.

    torchrun --nproc-per-node 2 tools/benchmark/planned_transfer.py --config DIRECTORY

DIRECTORY holds a published config.json. The first half of the ranks hold the tensor-parallel shards of a trainer, with
random weights; the second half have vLLM's model of each rank of one engine, whose loaders are traced, and whose
parameters receive the weights. Prints for each sync the seconds until the last rank's device has finished and the
gigabytes that an engine rank receives a second, with their checksums; on GPUs the memory of a sync beside the weights;
and the gigabytes a second of plain messages between the same ranks. With --of N only the first ranks of N on each side
run: what a rank of N sends and receives, on fewer GPUs. With --profile the host's functions of one more
sync are listed, and the device's kernels of another, of the first trainer and of the first engine rank.
"""

import argparse
import contextlib
import cProfile
import datetime
import os
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.models.config import params_dtype
from megatron_grpo.parallel.roles import nccl_options
from megatron_grpo.rollout.vllm.loader_trace import trace
from megatron_grpo.rollout.weight_sync import planned
from megatron_grpo.rollout.weight_sync.planned import Links, Transfer
from megatron_grpo.training.entry_point import run
from megatron_grpo.weights import families, hf, transfer_plan
from megatron_grpo.weights.transfer_plan import Holder
from tools import made_up
from tools.benchmark.published_shape import flags
from tools.made_up_engine import model_of_rank


def seconds(work: Callable[[], object], links: Links) -> float:
    """Return the seconds of the slowest rank until its device has done the work. Collective."""
    took = torch.tensor(made_up.seconds(work), dtype=torch.float64)  # of vLLM's model is another default
    dist.all_reduce(took, dist.ReduceOp.MAX, group=links.host)
    return took.item()


def measure(
    transfer: Transfer, run: Callable[[], object], size: int, links: Links, options: argparse.Namespace
) -> None:
    """Print the seconds of each sync, and of plain messages of the bytes of an engine rank."""
    rank, half = links.host.rank(), links.host.size() // 2
    on_gpu = links.device != torch.device("cpu")
    held = 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    for number in range(options.syncs):
        took = seconds(run, links)
        if rank == 0:
            print(f"sync {number}: {took:.4f} s, {size / took / 1e9:.0f} GB/s to an engine rank", flush=True)
    assert not transfer.differences
    if on_gpu:
        most = torch.zeros(2, dtype=torch.float64)
        most[rank // half] = torch.cuda.max_memory_allocated() - held
        dist.all_reduce(most, dist.ReduceOp.MAX, group=links.host)
        if rank == 0:
            print("memory of a sync, MiB: trainer {:.0f}, engine {:.0f}".format(*(most / 2**20).tolist()), flush=True)
    if options.profile:
        host = cProfile.Profile()
        host.runcall(run)
        with torch.profiler.profile() as recorded:  # another sync: each profile makes the other's functions slower
            run()
        of_device = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        for shown in (0, half):
            dist.barrier(group=links.host)
            if rank == shown:
                pstats.Stats(host).sort_stats("tottime").print_stats(12)
                print(recorded.key_averages().table(of_device, row_limit=16, max_name_column_width=60), flush=True)
    message = torch.empty(min(size, 2**30), dtype=torch.uint8, device=links.device)
    counts = [0] * (2 * half)
    counts[rank + half if rank < half else rank - half] = len(message)
    sent, received = (counts, [0] * len(counts)) if rank < half else ([0] * len(counts), counts)
    into = message if rank >= half else message[:0]
    out = message if rank < half else message[:0]
    plain = min(seconds(lambda: links.weights.alltoall_base(into, out, received, sent).wait(), links) for _ in range(4))
    if rank == 0:
        print(f"plain messages: {len(message) / plain / 1e9:.0f} GB/s", flush=True)


def main() -> None:
    """Parse the command line, make both sides, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="DIRECTORY", help="holds config.json as published")
    parser.add_argument("--syncs", type=int, default=5, metavar="N", help="syncs; the first one has further work [5]")
    parser.add_argument("--of", type=int, metavar="N", help="tensor-parallel ranks of each side [those that run]")
    parser.add_argument("--profile", action="store_true", help="list functions and kernels of a sync")
    options = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world % 2:
        parser.error(f"{world} ranks: start an even number of them by torchrun --nproc-per-node")
    config = hf.read_config(options.config)
    args = made_up.parse([*flags(families.for_hf_config(config).args_from_hf(config)), "--bf16"], 1)
    rank, half, on_gpu = int(os.environ["RANK"]), world // 2, torch.cuda.is_available()
    width = options.of or half  # tensor-parallel ranks
    if width < half:
        parser.error(f"--of {width}: {half} ranks run on each side")
    if args.num_experts and not on_gpu:
        parser.error("vLLM's CPU build has no experts that are written in place: take a GPU")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(minutes=5)
    dist.init_process_group("gloo", timeout=timeout)
    settings = {"backend": "nccl", "pg_options": nccl_options(timeout)} if on_gpu else {"backend": "gloo"}
    links = Links(dist.group.WORLD, dist.new_group(timeout=timeout, **settings), device)
    weights = planned.table(args, "weights")
    tensors = transfer_plan.hf_tensors(weights, params_dtype(args))
    size = sum(tensor.nbytes for tensor in tensors) // width
    begun = time.perf_counter()
    if rank < half:
        with torch.device(device):
            shards = {w.name: torch.rand(w.shard_shape(width)).to(w.dtype or params_dtype(args)) for w in weights}
        holder = Holder(np.ones(len(weights), np.bool_), 0, (rank, width), (rank, width))
        transfer = Transfer(args, links, weights, holder)
        if rank == 0:
            print(f"{size * width / 1e9:.2f} GB, planned in {time.perf_counter() - begun:.1f} s", flush=True)
        measure(transfer, lambda: transfer.send(shards), size, links, options)
    else:
        with contextlib.ExitStack() as stack:
            with torch.device(device):
                model = stack.enter_context(model_of_rank(options.config, rank - half, width, dtype="bfloat16"))
            transfer = Transfer(args, links, weights, reads=lambda tensors: trace(model, tensors, in_place=True))
            if rank == half:
                print(f"{len(transfer._direct)} of {len(tensors)} tensors go straight into parameters", flush=True)
            measure(transfer, lambda: list(transfer.run()), size, links, options)
    dist.barrier(group=links.host)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
