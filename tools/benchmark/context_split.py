"""Count what context parallelism splits, pads and gathers with and without --hybrid-context-parallel, without a GPU.

    python tools/benchmark/context_split.py --completions 512 --median 700 --mean 1400 --tokens 32768 --sizes 4 8

The lengths are those of tools/benchmark/update.py, and the schedule is the trainer's, for one data-parallel rank of
Qwen3-4B's shape; the budget just takes the longest sequence. For each context-parallel size CP, the table has

- micro-batches of an update, by degree;
- tokens that are not split over ranks (in packs of degree 1), and padding, of all tokens;
- the mean number of consecutive tokens of a sequence on a rank: the queries of one piece in the attention kernel;
- keys and values that a rank receives in an update in 16 bits: forward, and as much again as gradients backward;
- the time over that of perfectly divided work, if ranks wait for each other after each micro-batch.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_up
import numpy as np

from megatron_grpo.data.schedule import Schedule, attention_coefficient, hybrid_schedule, schedule
from megatron_grpo.parallel.zigzag import padded_lengths, sequence_multiple

LAYERS, HIDDEN, QUERIES, KEYS, FFN = 36, 2560, 32 * 128, 8 * 128, 9728  # Qwen3-4B


def counted(lengths: np.ndarray, degrees: list[int], ranks: Schedule) -> str:
    """Return the cells of a schedule: [micro-batch] -> degree, [rank][micro-batch] -> completions."""
    work = lengths + attention_coefficient(HIDDEN, QUERIES, KEYS, FFN) * lengths.astype(float) ** 2
    alone = held = pieces = 0
    received, in_step = np.zeros(len(ranks)), 0.0
    for number, degree in enumerate(degrees):
        of_ranks = [padded_lengths(lengths[rank[number]], degree) for rank in ranks]
        alone += sum(int(lengths[rank[number]].sum()) for rank in ranks) * (degree == 1)
        held += sum(int(padded.sum()) for padded in of_ranks) // degree
        pieces += sum(len(padded) for padded in of_ranks) * sequence_multiple(degree) // degree
        tokens = np.array([padded.sum() for padded in of_ranks])
        received += tokens * (degree - 1) / degree * 2 * KEYS * 2 * LAYERS
        in_step += max(work[rank[number]].sum() for rank in ranks) / degree
    number_of = Counter(degrees)
    cells = [
        " + ".join(f"{number_of[degree]} of CP{degree}" for degree in sorted(number_of)),
        f"{alone / lengths.sum():.0%}",
        f"{held / lengths.sum() - 1:.2%}",
        f"{held / pieces:,.0f}",
        f"{2 * received.mean() / 2**30:.1f} GiB",
        f"{in_step * len(ranks) / work.sum():.3f}",
    ]
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--completions", type=int, default=512, metavar="N", help="completions of an update [512]")
    parser.add_argument("--median", type=float, default=700, metavar="TOKENS", help="median of the lengths [700]")
    parser.add_argument("--mean", type=float, default=1400, metavar="TOKENS", help="mean before the cut [1400]")
    parser.add_argument("--tokens", type=int, default=32768, metavar="N", help="longest sequence [32768]")
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 4, 8], metavar="CP", help="powers of two [2 4 8]")
    options = parser.parse_args()
    lengths = np.array(
        made_up.lognormal_lengths(options.completions, options.median, options.mean, options.tokens), np.int64
    )
    print(f"{lengths.sum():,} tokens, mean {lengths.mean():.0f}, median {np.median(lengths):.0f}\n")
    print("| CP | | micro-batches | not split | padding | tokens of a piece | keys and values | time |")
    print("|--:|---|---|--:|--:|--:|--:|--:|")
    coefficient = attention_coefficient(HIDDEN, QUERIES, KEYS, FFN)
    for size in options.sizes:
        budget = int(padded_lengths(lengths, size).max())
        whole = schedule(padded_lengths(lengths, size), 1, max_tokens=budget, attention_coefficient=coefficient)
        cells = counted(lengths, [size] * len(whole[0]), whole * size)
        print(f"| {size} | without | {cells} |")
        cells = counted(lengths, *hybrid_schedule(lengths, 1, size, budget // size, attention_coefficient=coefficient))
        print(f"| {size} | with | {cells} |")


if __name__ == "__main__":
    main()
