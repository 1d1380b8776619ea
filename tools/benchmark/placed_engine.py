"""Measure what an engine of --rollout-ranks costs the host beside the same engine colocated, on the same work.

    torchrun --nproc-per-node 2 tools/benchmark/placed_engine.py --batches 4 --update 1.4 MODEL_FLAGS

Rank 0 is a trainer of no model: it takes batches, waits for --update seconds in place of an update, and publishes
made-up weights. Rank 1 is the engine: first it runs --batches rollouts as a colocated engine does (`collect_rollout`),
then it obeys the trainer (`Producer`). Completions have lognormal lengths (`long_tail.py`), the same in both; prompts,
rewards and weights are made up. Flags that are not in --help are those of pretrain_grpo.py. Prints a Markdown table,
a row for each: completion tokens a second, and by decode step the microseconds of the engine's thread: in vLLM's
scheduler and output processor, in all of `poll` (without a GPU this has the model), and outside of it. The first
batch of each does not count. With --functions N the N functions of the placed engine with the largest own time are
listed.
"""

import argparse
import contextlib
import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampler import PromptSampler
from megatron_grpo.models.config import params_dtype
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel.initialize import initialize_distributed, joint
from megatron_grpo.parallel.roles import Joint
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rollout.collect import collect_rollout, everything
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.rollout.plan import RolloutPlan, rollout_seed, training_sampling
from megatron_grpo.rollout.stream.placed import PlacedEngines
from megatron_grpo.rollout.stream.producer import Producer
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.rollout.vllm.scheduler import scheduler_of
from megatron_grpo.rollout.weight_sync.weight_check import PROMPTS_PER_REPLICA, probe_plan
from megatron_grpo.training.entry_point import run
from megatron_grpo.weights import families
from megatron_grpo.weights.parameter_mapping import Weight
from megatron_grpo.weights.stream import WeightStream, streamed
from tools import made_up
from tools.benchmark.long_tail import DrawnLengths, Lengths
from tools.benchmark.rollout import REWARD, Numbers

HOST = ("schedule", "update_from_output", "process_outputs")


class Rows(list):
    """Made-up prompts as a data set."""

    def first(self, count: int) -> list[Prompt]:
        """Return the first prompts."""
        return self[:count]


class MadeUpWeights(Mapping):
    """The shards of a trainer of one rank, by name; their values are drawn when they are read."""

    def __init__(self, table: Sequence[Weight], params: torch.dtype, seed: int):
        self._table, self._params = {weight.name: weight for weight in table}, params
        self._generator = torch.Generator().manual_seed(seed)

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._table[name]
        return (torch.randn(weight.shard_shape(1), generator=self._generator) * 0.02).to(weight.dtype or self._params)

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


class Clocked(DrawnLengths):
    """An engine with drawn lengths that counts its tokens, its steps and their CPU time."""

    def __init__(self, engine: VllmColocate, args, lengths: Lengths, per_rollout: int):
        super().__init__(engine, args, lengths)
        self._per_rollout = per_rollout
        self.tokens = self.num_steps = 0
        self.in_poll = 0.0
        self.in_host = [0.0]

    def poll(self) -> list[Completion]:
        """Run one engine step."""
        begun = time.thread_time()
        done = super().poll()
        self.in_poll += time.thread_time() - begun
        self.num_steps += 1
        self.tokens += sum(len(c.token_ids) for c in done)
        return done

    def now(self) -> np.ndarray:
        """Return tokens, steps, and seconds: in vLLM's host part, in `poll`, of the thread, of the wall."""
        return np.array(
            [self.tokens, self.num_steps, self.in_host[0], self.in_poll, time.thread_time(), time.perf_counter()]
        )


class TimedProducer(Producer):
    """Adds the time to ``marks`` when a batch has been sent."""

    def __init__(self, marks: list[np.ndarray], placed: "Clocked", *args):
        self._marks, self._placed = marks, placed
        super().__init__(*args)

    def _send_groups(self, numbers: Sequence[int]) -> None:
        super()._send_groups(numbers)
        self._marks.append(self._placed.now())


def clock_parts(engine: VllmColocate) -> list[float]:
    """Return a list whose number becomes the seconds of CPU time in vLLM's scheduler and output processor."""
    total, scheduler = [0.0], scheduler_of(engine._engine)

    def timed(inner):
        def function(*args, **kwargs):
            begun = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                total[0] += time.thread_time() - begun

        return function

    for owner, name in ((scheduler, HOST[0]), (scheduler, HOST[1]), (engine._engine.output_processor, HOST[2])):
        setattr(owner, name, timed(getattr(owner, name)))
    return total


def line(name: str, before: np.ndarray, after: np.ndarray) -> str:
    """Return a row of the table."""
    tokens, steps, host, poll, thread, wall = after - before
    cells = [f"{tokens / wall:,.0f}", f"{steps:,.0f}", f"{wall:.2f}"]
    cells += [f"{1e6 * seconds / steps:,.0f}" for seconds in (host, poll, thread - poll)]
    return f"| {name} | {' | '.join(cells)} |"


def train(args, roles, dataset: Rows, own) -> None:
    """Take batches and publish weights, as the trainer does."""
    sampler = PromptSampler(len(dataset), seed=args.seed)
    engines = PlacedEngines(args, roles, dataset, sampler, lambda signal: None)  # type: ignore[arg-type]
    engines.start()
    for batch in range(own.batches + 1):
        table, params = streamed(args, only_trained=False), params_dtype(args)
        engines.update_weights(WeightStream(table, MadeUpWeights(table, params, batch), params), batch)
        probes = bool(args.max_staleness and not own.no_probe)
        if probes:
            plan = probe_plan(args, dataset.first(PROMPTS_PER_REPLICA), engines.num_replicas)
            finish = engines.begin(plan, everything, data="train", scored=False)
        began = time.perf_counter()
        _, _, metrics = engines.take(everything)
        if probes:
            finish()
        waited = time.perf_counter() - began
        print(f"batch {batch}: waited {waited:.2f} s, idle {metrics['stream/engine_idle']:.2f} s", flush=True)
        if batch < own.batches:
            time.sleep(own.update)
    engines.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=3, metavar="N", help="batches that count [3]")
    parser.add_argument("--update", type=float, default=1.0, metavar="S", help="seconds of an update [1]")
    parser.add_argument("--median", type=float, default=240, metavar="N", help="median length of completions [240]")
    parser.add_argument("--mean", type=float, default=285, metavar="N", help="their mean length [285]")
    parser.add_argument("--prompt", type=int, default=100, metavar="N", help="tokens of a prompt [100]")
    parser.add_argument("--no-probe", action="store_true", help="publish without a probe of the weights")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="functions to list [0: none]")
    own, flags = parser.parse_known_args()
    flags = ["--rollout-ranks", "1", "--ignore-eos", "--max-prompt-length", str(own.prompt), *flags]
    args = made_up.parse(flags, 1)
    initialize_distributed(args)
    roles = cast(Joint, joint())
    ids = np.random.default_rng(0).integers(3, args.vocab_size - 2, (4096, own.prompt)).tolist()
    dataset = Rows(Prompt(i, prompt, {}, "made up") for i, prompt in enumerate(ids))
    if roles.role.replica is None:
        train(args, roles, dataset, own)
        return
    engine = VllmColocate(args, families.for_args(args).hf_from_args(args))
    parts = clock_parts(engine)
    lengths = Lengths(args.max_completion_length, own.median, own.mean)
    with tempfile.TemporaryDirectory() as directory:
        plugin = Path(directory, "length.py")
        plugin.write_text(REWARD)
        scorer = RewardPool(["length"], [str(plugin)], args.reward_workers, args.reward_timeout)
        colocated = Clocked(engine, args, lengths, args.generation_batch_size)
        colocated.in_host = parts
        groups = args.generation_batch_size // args.num_generations
        marks = []
        for batch in range(own.batches + 1):
            prompts = dataset[batch * groups : (batch + 1) * groups]
            plan = RolloutPlan(
                prompts, args.num_generations, training_sampling(args, batch + 1), rollout_seed(args.seed, batch + 1)
            )
            collect_rollout(colocated, plan, scorer, Numbers(), Timers())
            marks.append(colocated.now())
        colocated_line = line("colocated", marks[0], marks[-1])
        placed = Clocked(engine, args, lengths, 0)
        placed.in_host, marks = parts, []
        producer = TimedProducer(marks, placed, args, placed, scorer, Numbers(), dataset, None, roles)
        profile = cProfile.Profile() if own.functions else contextlib.nullcontext()
        with profile:
            producer.run()
        heads = ["engine", "tokens/s", "steps", "seconds", "scheduler, outputs us", "poll us", "outside us"]
        print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}\n{colocated_line}", flush=True)
        print(line("placed", marks[0], marks[-1]), flush=True)
        if isinstance(profile, cProfile.Profile):
            pstats.Stats(profile).sort_stats("tottime").print_stats(own.functions)
        scorer.close()
    engine.close()


if __name__ == "__main__":
    run(main)
