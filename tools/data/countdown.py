"""Make prompt files of the countdown game for GRPO: reach a target by + - * / from numbers, each used once.

    python tools/data/countdown.py --input train.parquet --output countdown.parquet
    python tools/data/countdown.py --generate 10000 --numbers 3 4 --seed 1 --output countdown.jsonl

Converts rows {"target": 98, "nums": [44, 19, 35]} (the format of Jiayi-Pan/Countdown-Tasks-3to4), or generates rows
that have a solution. Rows of the output have "prompt" (chat messages), "nums", "target" and "data_source". Train on
them with --reward-funcs countdown. The tool searches a solution of each row that this reward accepts; a row without one
is bad.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_grpo.rewards.builtin.countdown import countdown
from megatron_grpo.rewards.registry import Sample
from megatron_grpo.utils.errors import GrpoError
from tools.data.common import add_output_flags, chat, convert_files, write_outputs

QUESTION = "Using the numbers {numbers}, each exactly once, write an expression that equals {target}."
INSTRUCTION = "You may use +, -, *, / and brackets. Put the expression in <answer> </answer> tags."
LARGEST = 10**12
Term = tuple[float, str]


def solutions(nums: list[int], target: int) -> Iterator[str]:
    """Yield expressions of all the numbers that equal the target, up to rounding."""
    terms = [(float(number), str(number)) for number in nums]
    return (expression for value, expression in results(terms) if abs(value - target) < 1e-6)


def results(terms: list[Term]) -> Iterator[Term]:
    """Yield all values, with their expressions, that these terms can form together."""
    if len(terms) == 1:
        yield terms[0]
    for i, (a, left) in enumerate(terms):
        for j, (b, right) in enumerate(terms):
            if i == j:
                continue
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            made = [(a - b, f"({left} - {right})")]
            if i < j:  # + and * are commutative
                made += [(a + b, f"({left} + {right})"), (a * b, f"({left} * {right})")]
            if b:
                made.append((a / b, f"({left} / {right})"))
            for term in made:
                yield from results([*rest, term])


def convert(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Convert a row of the game to a prompt row; raise GrpoError if it has no numbers or no solution."""
    nums, target = row.get("nums"), row.get("target")
    countdown(Sample("", "", row))  # raises GrpoError for invalid numbers
    assert isinstance(nums, list) and isinstance(target, int)
    if len(nums) > 5:
        raise GrpoError(f'"nums" has {len(nums)} numbers; the search for a solution takes up to 5')
    if max(map(abs, [*nums, target])) > LARGEST:
        raise GrpoError(f'"nums" and "target" must be at most {LARGEST:,} for the search for a solution')
    question = QUESTION.format(numbers=", ".join(map(str, nums)), target=target)
    result = {"prompt": chat(question, INSTRUCTION), "nums": nums, "target": target, "data_source": "countdown"}
    if not any(countdown(Sample("", f"<answer>{found}</answer>", result)) == 1 for found in solutions(nums, target)):
        raise GrpoError(f"{target} cannot be made of {nums}")
    return result


def numbers_and_target(row: dict[str, Any]) -> str:
    """Return the numbers in ascending order and the target: the order of the numbers does not make another game."""
    return f"{sorted(row['nums'])} {row['target']}"


def generate(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Generate --generate different rows with a solution, from --numbers, --largest and --seed."""
    if min(args.numbers) < 2 or max(args.numbers) > 5 or args.largest < 1 or args.generate < 1:
        raise GrpoError("--generate needs at least 1 row, --numbers 2 to 5, --largest at least 1")
    rng, tries = random.Random(args.seed), 0
    rows: dict[tuple[int, ...], dict[str, Any]] = {}  # by the sorted numbers and the target
    while len(rows) < args.generate:
        tries += 1
        if tries > 100 * args.generate + 1000:
            raise GrpoError(f"found only {len(rows)} different rows: give more --numbers or a higher --largest")
        terms: list[Term] = [(n, "") for n in (rng.randint(1, args.largest) for _ in range(rng.choice(args.numbers)))]
        nums = [int(value) for value, _ in terms]
        while len(terms) > 1:  # a random calculation, which guarantees a solution
            (a, _), (b, _) = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
            terms.append((rng.choice([a + b, a - b, a * b, *([a / b] if b and a % b == 0 else [])]), ""))
        target = int(terms[0][0])
        if 1 <= target <= 10 * args.largest:
            rows[(*sorted(nums), target)] = convert({"nums": nums, "target": target}, args)
    return list(rows.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--generate", type=int, metavar="N", help="generate N rows instead of converting --input")
    parser.add_argument(
        "--numbers", type=int, nargs="+", default=[3, 4], metavar="N", help="possible counts of numbers [3 4]"
    )
    parser.add_argument("--largest", type=int, default=99, metavar="N", help="largest number [99]")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of --generate [1234]")
    if not any(word.startswith("--generate") for word in argv or sys.argv):
        return convert_files(__doc__, convert, parser, argv, numbers_and_target)
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    add_output_flags(parser)
    args = parser.parse_args(argv)
    try:
        write_outputs(generate(args), args, numbers_and_target)
    except GrpoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
