"""Measure the exchange of a rollout between ranks: memory of each rank, and seconds.

    python tools/benchmark/exchange.py --ranks 2 4 8 --megabytes 64

Every rank starts as an engine replica that has made an equal part of the rollout, and wants another part, as the
data-parallel rank that trains it. Compared are three cases: an equal part for each rank, an equal part with one rank
that has made the whole rollout, and the whole rollout for each rank, as without a
division. Memory is the peak of a rank's process during the exchange above its memory before, without the completions
that it has made; the largest and the smallest of all ranks.
"""

import argparse
import gc
import os
import time
from pathlib import Path
from sys import path

path.insert(0, str(Path(__file__).resolve().parents[2]))
import numpy as np
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.share import of_all_ranks, with_tokens_of
from megatron_grpo.parallel import initialize

BYTES = 4 + 1 + 4 + 4  # of a token: id, mask, log-probability, version of the weights
LENGTH = 1024  # tokens of a completion on average


def part(numbers: np.ndarray) -> RolloutBatch:
    """Return made-up completions with these numbers; their lengths are functions of the numbers."""
    rng, n = np.random.default_rng(0), len(numbers)
    lengths = 2 + (numbers * 7919) % (2 * LENGTH - 3)
    total = int(lengths.sum())
    return RolloutBatch(
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        tokens=rng.integers(0, 1000, total).astype(np.int32),
        response_mask=np.ones(total, np.uint8),
        rollout_log_probs=np.zeros(total, np.float32),
        weight_version=np.zeros(total, np.int32),
        prompt_lengths=np.ones(n, np.int32),
        group_ids=numbers // 8,
        row_ids=numbers // 8,
        sample_ids=numbers,
        rewards=np.zeros((n, 1), np.float32),
        finish_reasons=np.full(n, FinishReason.STOP, np.uint8),
        turns=np.ones(n, np.int32),
    )


def peak_mib(reset: bool = False) -> float:
    """Return the peak memory of this process, in MiB; start again with ``reset``."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def work(rank: int, ranks: int, port: int, megabytes: int, results) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    initialize._host_group = dist.group.WORLD
    numbers = np.arange(megabytes * 2**20 // (BYTES * LENGTH))
    for case in ("a part", "a part, made by one rank", "everything"):
        maker = np.zeros_like(numbers) if "one rank" in case else numbers // 8 % ranks
        wants = np.random.default_rng(1).permutation(numbers) % ranks == rank  # whatever the maker
        if case == "everything":
            wants[:] = True
        own = part(np.flatnonzero(maker == rank))
        dist.barrier()
        gc.collect()
        before, began = peak_mib(reset=True), time.perf_counter()
        batch = with_tokens_of(of_all_ranks(own), wants)
        seconds = time.perf_counter() - began
        share = sum(array.nbytes for array in batch.arrays().values()) / 2**20
        results.put((case, rank, peak_mib() - before, share, seconds))
        del own, batch
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="numbers of ranks [2 4 8]")
    parser.add_argument("--megabytes", type=int, default=64, metavar="N", help="per-token arrays of the rollout [64]")
    options = parser.parse_args()
    print("| ranks | each rank gets | its part, MiB | memory above before, MiB | seconds |\n|--:|---|--:|--:|--:|")
    for ranks in options.ranks:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        multiprocessing.spawn(work, (ranks, initialize.free_port(), options.megabytes, results), ranks)
        rows = [results.get() for _ in range(3 * ranks)]
        for case in dict.fromkeys(row[0] for row in rows):
            _, _, memory, share, seconds = zip(*(row for row in rows if row[0] == case), strict=True)
            memory_range = f"{min(memory):.0f} to {max(memory):.0f}"
            print(f"| {ranks} | {case} | {max(share):.1f} | {memory_range} | {max(seconds):.2f} |")


if __name__ == "__main__":
    main()
