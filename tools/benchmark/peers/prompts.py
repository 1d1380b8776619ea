"""Write word problems as prompts, in the row formats of this project, TRL, ms-swift and verl.

    python tools/benchmark/peers/prompts.py --save runs/peers/inputs

Writes rows.jsonl (this project and TRL), messages.jsonl (ms-swift) and rows.parquet (verl). All three have the same
problems in the same order; they have the form and length of GSM8K's.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.data.common import write_rows

PROBLEM = (
    "{name} sold {first} {thing} in April, and then {name} sold {factor} times as many {thing} in May. "
    "In June {name} gave {given} {thing} away. How many {thing} did {name} sell altogether in April and May?"
)
NAMES = "Natalia Weng Betty Julie James Mark Albert Ken Alexis Tina".split()
THINGS = "clips pages flowers sprints boxes tickets apples books pencils cards".split()


def problem(number: int) -> tuple[str, int]:
    """Return a problem and its answer, by its number."""
    draw = random.Random(number)
    first, factor, given = draw.randint(10, 99), draw.randint(2, 9), draw.randint(10, 99)
    text = PROBLEM.format(name=draw.choice(NAMES), thing=draw.choice(THINGS), first=first, factor=factor, given=given)
    return text, first + factor * first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, required=True, metavar="DIR", help="folder of the files")
    parser.add_argument("--count", type=int, default=4096, metavar="N", help="problems [4096]")
    own = parser.parse_args()
    rows = []
    for text, answer in map(problem, range(own.count)):
        prompt = [{"role": "user", "content": text}]
        verl = {"data_source": "word_problems", "reward_model": {"style": "rule", "ground_truth": str(answer)}}
        rows.append({"prompt": prompt, "answer": str(answer), **verl})
    write_rows(rows, own.save / "rows.jsonl")
    write_rows(rows, own.save / "rows.parquet")
    write_rows([{"messages": row["prompt"]} for row in rows], own.save / "messages.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
