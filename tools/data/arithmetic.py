"""Make arithmetic problems as prompts (`12+7=` -> `19`), in four files for a supervised warm-up and GRPO.

    python tools/data/arithmetic.py --save data/arithmetic --operations + - --digits 1 2 --reversed

    python tools/data/arithmetic.py --save data/tools --digits 4 --pairs 20000 --tool-calls 0.2

Writes warmup (supervised warm-up), train (GRPO), valid (to stop the warm-up) and test (held out from both), as .jsonl
or .parquet. A row has `prompt`, `answer` and `data_source`.

The files share no *unordered* operand pair: if one file has `3+5=`, no other file has `5+3=`. Otherwise a model that
has only learnt a+b = b+a would appear to solve unseen problems. In subtractions the larger operand comes first, so no
answer is negative. The draw depends only on the arguments and --seed.

With --tool-calls the prompt is a chat message. The rows of warmup and valid also have the whole conversation,
`messages`: in this share of warmup the assistant calls the tool `calculate` and repeats its result, in the others it
answers at once. In valid it always calls the tool.
"""

import argparse
import math
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_grpo.utils.errors import GrpoError
from tools.data.common import print_summary, write_rows

SPLITS = ("warmup", "train", "valid", "test")
# 10% of the 5,050 pairs of 0..99 are about 1,000 held-out prompts: the standard error at an accuracy of 0.9 is
# sqrt(0.9 * 0.1 / 1000) = 0.0095, so 0.90 and 0.93 differ significantly. 3% (300 prompts) are enough to stop at 0.3.
DEFAULT_SHARES = (0.44, 0.43, 0.03, 0.10)
LARGEST = 1_000_000


def operands(digits: list[int]) -> list[range]:
    """Return the numbers with these digit counts, as ascending ranges (1 digit: 0 to 9, 2 digits: 10 to 99, ...)."""
    return [range(0 if d == 1 else 10 ** (d - 1), 10**d) for d in sorted(set(digits))]


def pick(ranges: list[range], index: int) -> int:
    """Return the number at a position of the concatenated ranges."""
    for numbers in ranges:
        if index < len(numbers):
            return numbers[index]
        index -= len(numbers)
    raise IndexError(index)


def unordered_pair(index: int) -> tuple[int, int]:
    """Return the pair (i, j), i <= j, at position `index` = j(j+1)/2 + i of the list of all unordered pairs."""
    j = (math.isqrt(8 * index + 1) - 1) // 2
    return index - j * (j + 1) // 2, j


def problems(operation: str, small: int, large: int) -> list[tuple[str, int]]:
    """Return the prompts (without `=`) of an unordered pair, with their values; `small` <= `large`."""
    if operation == "-":
        return [(f"{large}-{small}", large - small)]
    value = small + large if operation == "+" else small * large
    orders = {(small, large), (large, small)}  # a single order if the operands are equal
    return [(f"{a}{operation}{b}", value) for a, b in sorted(orders)]


def make_splits(
    operations: list[str],
    digits: list[int],
    shares: tuple[float, ...] = DEFAULT_SHARES,
    pairs: int | None = None,
    reversed_answers: bool = False,
    seed: int = 1234,
) -> dict[str, list[dict]]:
    """Return the shuffled rows of the four files; `pairs` limits the operand pairs per operation (None: all).

    Raises GrpoError if fewer than `pairs` pairs exist, for invalid shares, or if a file would be empty.
    """
    if len(shares) != len(SPLITS) or min(shares) < 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise GrpoError(
            f"--shares {' '.join(map(str, shares))}: give four numbers >= 0 with the sum 1, for {', '.join(SPLITS)}"
        )
    if min(digits) < 1:
        raise GrpoError(f"--digits {min(digits)}: a number has at least 1 digit")
    ranges = operands(digits)
    count = sum(map(len, ranges))
    existing = count * (count + 1) // 2
    if pairs is None and existing > LARGEST:
        raise GrpoError(
            f"--digits {' '.join(map(str, digits))} gives {existing:,} operand pairs per operation, more than "
            f"{LARGEST:,}; give the number of pairs to draw: --pairs N"
        )
    if pairs is not None and not 1 <= pairs <= existing:
        raise GrpoError(
            f"--pairs {pairs}: operands with --digits {' '.join(map(str, digits))} form {existing:,} different pairs; "
            f"give 1 to {existing:,}, or more --digits"
        )

    rng = random.Random(seed)
    rows: dict[str, list[dict]] = {name: [] for name in SPLITS}
    for operation in dict.fromkeys(operations):
        drawn = rng.sample(range(existing), pairs or existing)
        start, total_share = 0, 0.0
        for name, share in zip(SPLITS, shares, strict=True):
            total_share += share
            end = round(total_share * len(drawn))
            for index in drawn[start:end]:
                small, large = (pick(ranges, i) for i in unordered_pair(index))
                for expression, value in problems(operation, small, large):
                    answer = str(value)[::-1] if reversed_answers else str(value)
                    rows[name].append({"prompt": f"{expression}=", "answer": answer, "data_source": "arithmetic"})
            start = end
    for name, share in zip(SPLITS, shares, strict=True):
        if share > 0 and not rows[name]:
            raise GrpoError(
                f"{pairs or existing:,} operand pairs are too few: with a share of {share} the {name} file is empty; "
                f"give more --digits, or a larger share with --shares"
            )
        rng.shuffle(rows[name])
    return rows


def with_tool_calls(splits: dict[str, list[dict]], share: float, seed: int) -> dict[str, list[dict]]:
    """Return the rows as chats; in ``share`` of the warm-up's conversations the assistant calls the calculator."""
    rng = random.Random(seed)

    def conversation(question: dict, row: dict, share: float) -> list[dict]:
        answer = {"role": "assistant", "content": row["answer"]}
        if rng.random() >= share:
            return [question, answer]
        function = {"name": "calculate", "arguments": {"expression": row["prompt"].rstrip("=")}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        return [question, call, {"role": "tool", "content": row["answer"]}, answer]

    def chat(name: str, row: dict) -> dict:
        question = {"role": "user", "content": row["prompt"]}
        if name in ("train", "test"):
            return row | {"prompt": [question]}
        messages = conversation(question, row, share if name == "warmup" else 1.0)
        return row | {"prompt": [question], "messages": messages}

    return {name: [chat(name, row) for row in rows] for name, rows in splits.items()}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, required=True, metavar="DIR", help="folder of the four files")
    parser.add_argument("--format", choices=["jsonl", "parquet"], default="jsonl", help="format of the files [jsonl]")
    parser.add_argument("--operations", nargs="+", default=["+"], choices=["+", "-", "*"], help="operations [+]")
    parser.add_argument(
        "--digits", nargs="+", type=int, default=[1, 2], metavar="D", help="digit counts of operands [1 2]"
    )
    parser.add_argument("--pairs", type=int, metavar="N", help="operand pairs to draw per operation [all]")
    parser.add_argument(
        "--reversed", action="store_true", help="write answers with the last digit first, which is easier to learn"
    )
    parser.add_argument(
        "--tool-calls", type=float, metavar="SHARE", help="write conversations; this share of warmup calls a calculator"
    )
    parser.add_argument(
        "--shares",
        nargs=4,
        type=float,
        default=DEFAULT_SHARES,
        metavar=tuple(name.upper() for name in SPLITS),
        help="shares of the pairs in the four files [0.44 0.43 0.03 0.1]",
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of the draw [1234]")
    return parser


def main() -> int:
    """Parse the command line, write the files, print their summaries, and return the exit code."""
    args = build_parser().parse_args()
    try:
        splits = make_splits(args.operations, args.digits, args.shares, args.pairs, args.reversed, args.seed)
        if args.tool_calls is not None:
            if args.reversed or not 0 <= args.tool_calls <= 1:
                raise GrpoError(
                    f"--tool-calls {args.tool_calls}: give a share from 0 to 1, and leave out --reversed: the "
                    "calculator's results are not reversed"
                )
            splits = with_tool_calls(splits, args.tool_calls, args.seed)
        for name, rows in splits.items():
            if rows:
                path = args.save / f"{name}.{args.format}"
                write_rows(rows, path)
                print_summary(rows, path)
    except GrpoError as error:
        print(f"arithmetic.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
