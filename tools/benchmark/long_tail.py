"""Train with drawn completion lengths: pretrain_grpo.py, whose completions have lengths of a lognormal distribution.

    torchrun --nproc-per-node 1 tools/benchmark/long_tail.py --median 384 --mean 687 FLAGS_OF_PRETRAIN_GRPO
    bash tools/benchmark/long_tail.sh local RUN_DIR    # synchronous and partial rollouts of a Qwen3 shape, and a table

A model with random weights never ends a completion. Each completion gets a length of its own, by its number in the run,
cut at --max-completion-length: the same number has the same length with and without --partial-rollouts, and with
engines on ranks of their own (--rollout-ranks). Give --ignore-eos.
"""

import argparse
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import pretrain_grpo
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.training import setup
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.log import print_rank_0


class Lengths:
    """Lengths of completions, lognormal with this ``median`` and ``mean``, and at most ``longest``."""

    def __init__(self, longest: int, median: float, mean: float):
        self._longest, self._median, self._sigma = longest, median, math.sqrt(2 * math.log(mean / median))

    def of(self, number: int) -> int:
        """Return the length of a completion, by its number in the run."""
        drawn = self._median * math.exp(self._sigma * np.random.default_rng(number).standard_normal())
        return min(max(round(drawn), 1), self._longest)


class DrawnLengths:
    """An engine whose completions end at lengths drawn for each of them."""

    def __init__(self, engine, args, lengths: Lengths):
        self._engine, self._lengths = engine, lengths
        # With partial rollouts and --rollout-ranks requests are numbered over the whole run, otherwise in a rollout.
        self._per_rollout = 0 if args.partial_rollouts or args.rollout_ranks else args.generation_batch_size
        self._rollouts = 0
        self.steps: list[int] = []  # of the engine, by rollout

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def rollout(self, seed: int):
        """Start a rollout."""
        self._rollouts += 1
        self.steps.append(0)
        return self._engine.rollout(seed)

    def poll(self) -> list[Completion]:
        """Run one engine step."""
        self.steps[-1] += 1
        return self._engine.poll()

    def _length(self, request: Request, first: int) -> int:
        return min(self._lengths.of(first + request.id), request.sampling.max_tokens)

    def submit(self, requests: Iterable[Request]) -> None:
        """Submit requests with their own lengths."""
        first = (self._rollouts - 1) * self._per_rollout
        self._engine.submit(
            replace(request, sampling=replace(request.sampling, max_tokens=self._length(request, first)))
            for request in requests
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--median", type=float, default=384, metavar="TOKENS", help="median of the lengths [384]")
    parser.add_argument("--mean", type=float, default=687, metavar="TOKENS", help="mean before the cut [687]")
    own, flags = parser.parse_known_args()
    args = parse_args(flags)
    lengths = Lengths(args.max_completion_length, own.median, own.mean)
    engines: list[DrawnLengths] = []

    def build_engine(args, *parts):  # these arguments are resolved
        count = args.train_iters // args.updates_per_rollout * args.generation_batch_size
        drawn = [lengths.of(number) for number in range(count)]
        print_rank_0(f"drawn lengths of the first {count} completions: mean {np.mean(drawn):.1f}, longest {max(drawn)}")
        engines.append(DrawnLengths(built(args, *parts), args, lengths))
        return engines[-1]

    built, setup.build_engine = setup.build_engine, build_engine
    trainer = setup.setup(args, model_provider, pretrain_grpo.forward_step)
    if trainer is None:  # after --dry-run
        return
    pretrain_grpo.train(trainer.args, trainer)
    for engine in engines:
        print_rank_0(f"engine steps of each rollout: {engine.steps}")


if __name__ == "__main__":
    run(main)
