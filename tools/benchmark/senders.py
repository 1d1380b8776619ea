"""Measure the weight sync to engines on ranks of their own, with one sender and with trainers that send in turn.

    torchrun --nproc-per-node 4 tools/benchmark/senders.py --megabytes 256 --bucket-megabytes 32

The first half of the ranks are trainers: each holds a shard of every tensor, and gathers the whole one, as with tensor
parallelism. The others are engines. Everything goes over gloo. A bucket is gathered by all trainers and then broadcast
to the engines:

- one sender, in turn: rank 0 broadcasts, and then the next bucket is gathered (the program's way);
- one sender, overlapped: the next bucket is gathered during the broadcast;
- all trainers in turn, overlapped: trainer i broadcasts the buckets i, i + trainers, ...

Bytes are those that the kernel took from each process (wchar of /proc/self/io).
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist


def sent() -> int:
    """Return the bytes that this process has written so far."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def sync(shards, buckets: int, groups, trainers, half: int, senders: int, overlapped: bool) -> torch.Tensor | None:
    """Send all buckets once; return the newest one on an engine rank."""
    rank = dist.get_rank()
    under_way: list = []
    whole = None
    for number in range(buckets):
        sender = number % senders
        if rank < half:
            whole = torch.empty(half * shards[number].numel(), dtype=torch.uint8)
            dist.all_gather_into_tensor(whole, shards[number], group=trainers)
        else:
            whole = torch.empty(half * shards[0].numel(), dtype=torch.uint8)
        if rank == sender or rank >= half:
            under_way.append((dist.broadcast(whole, src=sender, group=groups[sender], async_op=True), whole))
        while under_way and (not overlapped or len(under_way) > 1):
            under_way.pop(0)[0].wait()
    for work, _ in under_way:
        work.wait()
    return whole


def main() -> None:
    """Measure the three ways in turn, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="of the weights [256]")
    parser.add_argument("--bucket-megabytes", type=int, default=32, help="of a bucket [32]")
    parser.add_argument("--repeats", type=int, default=7, help="syncs of each way, whose median counts [7]")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    trainers = dist.new_group(range(half))
    groups = [dist.new_group([sender, *range(half, 2 * half)]) for sender in range(half)]
    buckets = args.megabytes // args.bucket_megabytes
    shards = [
        torch.full((args.bucket_megabytes * 2**20 // half,), number, dtype=torch.uint8) for number in range(buckets)
    ]
    ways = {
        "one sender, in turn": (1, False),
        "one sender, overlapped": (1, True),
        "all in turn, overlapped": (half, True),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    written: dict[str, int] = {}
    for _ in range(args.repeats):  # the ways alternate, so that other work on the machine meets all of them
        for way, (senders, overlapped) in ways.items():
            dist.barrier()
            before, began = sent(), time.perf_counter()
            newest = sync(shards, buckets, groups, trainers, half, senders, overlapped)
            written[way] = sent() - before
            dist.barrier()
            seconds[way].append(time.perf_counter() - began)
            assert rank < half or bool((newest == buckets - 1).all()), "an engine has other bytes"
    everywhere: list = [None] * (2 * half)
    dist.all_gather_object(everywhere, written)
    if rank == 0:
        print("| | MB that each rank sends | s, median (fastest) |\n|---|---|--:|")
        for way, values in seconds.items():
            of_ranks = ", ".join(f"{of_rank[way] / 1e6:.0f}" for of_rank in everywhere)
            print(f"| {way} | {of_ranks} | {statistics.median(values):.3f} ({min(values):.3f}) |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
