"""Measure peak memory and tokens per second of an update at increasing sequence lengths.

    torchrun --nproc-per-node N tools/benchmark/long_sequences.py MODEL_AND_LAYOUT_FLAGS --lengths 8192 16384 32768

Flags are those of pretrain_grpo.py; the weights are random, and the same for all lengths. Each update has two
completions of the full length on every data-parallel rank, one in a micro-batch. The last column is the growth of
memory from one length to the next, per token of a context-parallel rank: a constant value means that memory is linear
in the length.
"""

import argparse
import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import made_up  # first: it prepares for machines without a GPU

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo.parallel.initialize import initialize_distributed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--lengths", nargs="+", type=int, required=True, metavar="N", help="tokens of a sequence")
    options, flags = parser.parse_known_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    size = ["--max-prompt-length", "1", "--max-completion-length", str(max(options.lengths) - 1)]
    size += ["--num-generations", "2", "--micro-batch-size", "1"]
    dp = made_up.parse([*flags, *size, "--global-batch-size", str(2 * world)], world).data_parallel_size
    args = made_up.parse([*flags, *size, "--global-batch-size", str(2 * dp)], world)
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    lines = ["| tokens | peak GiB | tokens/s | loss | KiB more per token |", "|--:|--:|--:|--:|--:|"]
    before = None
    for length in sorted(options.lengths):
        made_up.peak_memory(reset=True)
        rows, tokens_per_second, _ = made_up.two_updates(args, trainer, made_up.rollout(args, length))
        peak = made_up.peak_memory()
        share = length / parallel_state.get_context_parallel_world_size()
        growth = f"{(peak - before[1]) / (share - before[0]) * 1024:.1f}" if before else ""
        lines.append(f"| {length} | {peak / 1024:.2f} | {tokens_per_second:,.0f} | {rows[-1]['loss']:.5f} | {growth} |")
        before = share, peak
        gc.collect()
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
