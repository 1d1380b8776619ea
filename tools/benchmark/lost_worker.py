"""Measure steps a second of an environment pool before and after its worker process is killed.

    python tools/benchmark/lost_worker.py --episodes 128 --seconds 0.2

Every episode always has a step under way, which sleeps in a thread. The worker is killed when each episode has made ten
steps. Prints a Markdown table: steps a second before; from the kill to the last answer to a step of before; after that.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from megatron_grpo.environments.environment import Turn
from megatron_grpo.environments.pool import EnvironmentPool

PLUGIN = """
import time
from megatron_grpo.environments.registry import Environment, register_environment

@register_environment("sleeps")
class Sleeps(Environment):
    def step(self, turn):
        time.sleep({seconds})
        return [{{"role": "user", "content": "."}}]

    def snapshot(self):
        return 0

    def restore(self, state):
        pass
"""


def answers(pool: EnvironmentPool, count: int) -> list[int]:
    """Wait for answers, repeat each episode's step, and return the keys; RuntimeError for a failure."""
    found: list[int] = []
    while len(found) < count:
        for answer in pool.poll(1.0):
            if answer.error:
                raise RuntimeError(answer.error)
            found.append(answer.key)
            pool.step(answer.key, Turn("."))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=128, help="episodes with a step under way [128]")
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds of a step [0.2]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plugin = Path(folder) / "sleeps.py"
        plugin.write_text(PLUGIN.format(seconds=args.seconds))
        pool = EnvironmentPool(["sleeps"], [plugin], timeout=600.0)
        for key in range(args.episodes):
            pool.begin(key, "sleeps", {})
        steps = 10 * args.episodes
        answers(pool, 2 * args.episodes)
        times = [time.monotonic()]
        answers(pool, steps)
        times.append(time.monotonic())
        (worker,) = psutil.Process(pool._workers[0].process.pid).children()
        worker.kill()
        left, repeated = set(range(args.episodes)), 0
        while left:
            found = answers(pool, 1)
            left -= set(found)
            repeated += len(found)
        times.append(time.monotonic())
        answers(pool, steps)
        times.append(time.monotonic())
        pool.close()
    print("| | steps a second |\n|---|---|")
    for name, count, begin in zip(("before", "repeated", "after"), (steps, repeated, steps), times, strict=False):
        print(f"| {name} | {count / (times[times.index(begin) + 1] - begin):.1f} |")


if __name__ == "__main__":
    main()
