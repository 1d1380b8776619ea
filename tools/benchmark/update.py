"""Measure updates of made-up completions, without engine and data: seconds, tokens/s, peak memory, and kernels.

    torchrun --nproc-per-node N tools/benchmark/update.py --completions 256 --tokens 512 MODEL_AND_LAYOUT_FLAGS
    torchrun --nproc-per-node 2 tools/benchmark/update.py --median 700 --mean 1400 --tokens 32768 MODEL_FLAGS \\
        --layouts "CP2: --max-tokens-per-microbatch 32768" \\
        "CP2: --max-tokens-per-microbatch 16384 --hybrid-context-parallel"

Flags are those of pretrain_grpo.py; the weights are random. Every completion has --tokens tokens, or with --median and
--mean a length of a lognormal distribution of which --tokens is the longest. With --prompt the --num-generations
completions of a group have a prompt of so many tokens, which --share-prompts computes once. --layouts (as in
tools/check_parallel.py) are measured one after the other in the same launch. The first update of --updates is left out
of the median. With --kernels N one more update is profiled: the N kinds of kernels with the largest time are listed,
after the time of transfers between ranks and that in which the ranks wait for each other in them.
Prints a Markdown table of rank 0; TFLOP/s are those of the model's matrix products on each rank (`flops/update`),
without padding.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist

import pretrain_grpo
from megatron_grpo.models import forward
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.device import device
from megatron_grpo.utils.log import print_rank_0
from tools import made_up
from tools.check_parallel import flags_of


def measured(flags: list[str], lengths: int | list[int], options: argparse.Namespace) -> str:
    """Run the updates of one layout; return its row of the table."""
    args = made_up.parse(flags, int(os.environ.get("WORLD_SIZE", "1")))
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    rows, seconds = [], []
    batch, chosen = made_up.one_update(args, lengths, options.prompt)

    def update() -> None:
        rows.append(pretrain_grpo.update(args, trainer, batch, chosen))

    for number in range(options.updates + bool(options.kernels)):
        if number == options.updates:
            made_up.print_profile("update", update, options.kernels)
        else:
            made_up.peak_memory(reset=True)
            seconds.append(made_up.seconds(update))
            print_rank_0(f"update {number + 1}: {seconds[-1]:.3f} s")
    peak, middle = torch.tensor(made_up.peak_memory() / 1024, device=device()), median(seconds[1:])
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    degrees = Counter(forward.assignment(args, batch, chosen)[0])
    packs = ", ".join(f"{number} of CP{degree}" for degree, number in sorted(degrees.items()))
    made_up.release(trainer)
    cells = f"{middle:.3f} | {seconds[0]:.2f} | {rows[1]['tokens/update'] / middle:,.0f} | "
    cells += f"{rows[1]['flops/update'] / middle / dist.get_world_size():.0f} | {peak.item():.1f} | {packs} | "
    return cells + f"{rows[1]['loss']:.5f} | {rows[1]['grad_norm']:.4f}"


def main() -> None:
    """Parse the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--completions", type=int, default=64, metavar="N", help="completions of an update [64]")
    parser.add_argument(
        "--tokens", type=int, default=512, metavar="N", help="tokens of a completion and its prompt [512]"
    )
    parser.add_argument("--prompt", type=int, default=1, metavar="N", help="of these, tokens of the prompt [1]")
    parser.add_argument("--median", type=float, metavar="TOKENS", help="median of lognormal lengths")
    parser.add_argument("--mean", type=float, metavar="TOKENS", help="their mean before the cut at --tokens")
    parser.add_argument("--layouts", nargs="+", metavar="LAYOUT", help='such as "CP2: FLAGS" [that of the other flags]')
    parser.add_argument("--updates", type=int, default=4, metavar="N", help="updates, at least two [4]")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="kinds of kernels to list [0: none]")
    options, flags = parser.parse_known_args()
    if options.kernels and not torch.cuda.is_available():
        parser.error("--kernels needs a GPU")
    if (options.median is None) != (options.mean is None) or (options.median and options.mean <= options.median):
        parser.error("--median and --mean go together, and the mean is the larger one")
    size = made_up.size_flags(options.completions, options.tokens, options.prompt)
    lengths = options.tokens
    if options.median:
        lengths = made_up.lognormal_lengths(options.completions, options.median, options.mean, options.tokens)
        print_rank_0(
            f"lengths: median {median(lengths):.0f}, mean {sum(lengths) / len(lengths):.0f}, {max(lengths)} at most"
        )
    lines = ["| layout | update s | first | tokens/s | TFLOP/s | peak GiB | micro-batches | loss | gradient norm |"]
    lines.append("|---|--:|--:|--:|--:|--:|---|--:|--:|")
    for layout in options.layouts or ["as given"]:
        own = [] if layout == "as given" else flags_of(layout)
        lines.append(f"| {layout} | {measured([*size, *flags, *own], lengths, options)} |")
    print_rank_0("\n" + "\n".join(lines))
    dist.barrier()


if __name__ == "__main__":
    run(main)
