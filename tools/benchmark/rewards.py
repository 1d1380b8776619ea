"""Completions per second that `accuracy` (math-verify) and `code` (three tests each, in the sandbox) score, and how
much of the scoring passes while completions are still generated.

    python tools/benchmark/rewards.py --completions 10000 --workers 4

The completions are made up: a page of thought, and a right answer or program in four of five cases. First they are all
there at once. Then they come one by one, over as long as the scoring took alone, as from an engine that is just as
fast as the scoring; what is still to be scored when the last has come is what a training step waits for. Prints a
Markdown table.
"""

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_grpo.rewards.arguments import REWARDS
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.registry import Sample
from megatron_grpo.rewards.sandbox.sandbox import isolation_here

FLAGS = {name[2:].replace("-", "_"): default for name, _, default, _ in REWARDS}
THOUGHT = "<think>" + "Let us see what follows from this, and try it with a smaller number first. " * 60 + "</think>\n"
PROGRAM = "```python\nnumbers = [int(word) for word in input().split()]\nprint(sum(numbers) + {error})\n```"


def math_sample(draw: random.Random) -> Sample:
    """A fraction, as the gold answer has it or times two over two, and now and then a wrong one."""
    a, b = draw.randint(1, 999), draw.randint(2, 99)
    right = draw.random() < 0.8
    answer = rf"\boxed{{\frac{{{2 * a}}}{{{2 * b if right else 2 * b + 1}}}}}"
    return Sample("", f"{THOUGHT}So it is ${answer}$.", {"answer": rf"\frac{{{a}}}{{{b}}}"})


def code_sample(draw: random.Random) -> Sample:
    """A program that adds numbers, now and then wrongly, and three tests of it."""
    lines = [[draw.randint(0, 10**6) for _ in range(20)] for _ in range(3)]
    tests = [{"stdin": " ".join(map(str, line)), "stdout": str(sum(line))} for line in lines]
    return Sample("", THOUGHT + PROGRAM.format(error=int(draw.random() >= 0.8)), {"tests": tests})


def measure(name: str, samples: list[Sample], fresh: list[Sample], workers: int) -> str:
    """A row of the table; the second half has samples of its own, since gold answers are read once."""
    pool = RewardPool([name], workers=workers, flags=FLAGS, timeout=FLAGS["reward_timeout"])
    pool.score(samples[: 4 * workers])  # imports, sandboxes
    start = time.perf_counter()
    values, failures = pool.score(samples)
    alone = time.perf_counter() - start
    start = time.perf_counter()
    for number, sample in enumerate(fresh):
        while (early := start + alone * number / len(samples) - time.perf_counter()) > 0:
            time.sleep(min(early, 0.01))
            pool.poll()
        pool.submit(number, sample)
    generated = time.perf_counter()
    pool.finish()
    waited = time.perf_counter() - generated
    pool.close()
    cells = [name, f"{values.mean():.2f}", len(failures), f"{len(samples) / alone:,.0f}", f"{alone:.1f}"]
    cells += [f"{generated - start:.1f}", f"{waited:.2f}", f"{1 - waited / alone:.0%}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=10_000, help="completions for each reward [10000]")
    parser.add_argument("--workers", type=int, default=1, help="processes that score [1]")
    own = parser.parse_args()
    draw = random.Random(1)
    print(f"{own.completions:,} completions for each, {own.workers} worker(s); code by {isolation_here(False)}\n")
    print("| reward | mean | failures | completions/s | scoring alone s | generation s | waited after it s | hidden |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for name, make in (("accuracy", math_sample), ("code", code_sample)):
        samples, fresh = ([make(draw) for _ in range(own.completions)] for _ in range(2))
        print(measure(name, samples, fresh, own.workers), flush=True)


if __name__ == "__main__":
    main()
