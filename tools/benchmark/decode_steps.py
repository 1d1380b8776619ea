"""Measure what a decode step costs the host, with the short path for decode steps and with vLLM's own scheduler.

    torchrun --nproc-per-node 1 tools/benchmark/decode_steps.py --sequences 128 512 MODEL_FLAGS

The weights are random; flags that are not in --help are those of pretrain_grpo.py. All sequences have the same length,
so that every step but the first and the last decodes a token of each. The two alternate in each round, on one engine;
on a GPU the short path is measured with vLLM's model runner, too, and with ours (decode_runner): a token of each
sequence in a step, and several.
Prints a Markdown table: medians over the steps of all rounds of the CPU time of this thread in vLLM's scheduler
(schedule, update_from_output with our log-probabilities) and output processor, and of CPU and wall time from one step
to the next. Without a GPU the latter are those of the model on the CPU. With --functions N one more rollout of the last
row is profiled: the N functions with the largest own time are listed.
"""

import argparse
import cProfile
import pstats
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.rollout.vllm.scheduler import scheduler_of
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.weights import families
from tools import made_up

PARTS = ("schedule", "update_from_output", "process_outputs")
PROMPT = 16  # tokens
EDGE = 10  # steps at the begin and the end of a rollout that do not count


class Clock:
    """Seconds of the parts of each step, and from one step to the next (CPU and wall)."""

    def __init__(self, engine: VllmColocate):
        scheduler, outputs = scheduler_of(engine._engine), engine._engine.output_processor
        self.steps: list[list[float]] = []
        self.now = dict.fromkeys(PARTS, 0.0)
        self.last = time.thread_time(), time.perf_counter()
        for owner, name in ((scheduler, PARTS[0]), (scheduler, PARTS[1]), (outputs, PARTS[2])):
            setattr(owner, name, self.timed(name, getattr(owner, name)))

    def timed(self, name: str, inner):
        """Return ``inner`` with its CPU time added to ``now``."""

        def function(*args, **kwargs):
            start = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.now[name] += time.thread_time() - start

        return function

    def next_step(self, under_way: int) -> tuple:
        """End a step: `generate` calls it after each."""
        now = time.thread_time(), time.perf_counter()
        self.steps.append([*self.now.values(), now[0] - self.last[0], now[1] - self.last[1]])
        self.now, self.last = dict.fromkeys(PARTS, 0.0), now
        return ()

    def rollout(self, engine: VllmColocate, sequences: int, sampling: Sampling) -> np.ndarray:
        """Complete ``sequences`` requests; return microseconds ``[steps, parts]``."""
        prompts = np.random.default_rng(0).integers(3, 100, (-(-sequences // 8), PROMPT)).tolist()
        requests = [Request(i, prompts[i // 8], sampling) for i in range(sequences)]
        self.steps = []
        with engine.rollout(1):
            done = list(generate(engine, requests, self.next_step))
        assert len(done) == sequences
        return 1e6 * np.array(self.steps[EDGE:-EDGE])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[128, 256, 512, 1024], metavar="N", help="rows [128 256 512 1024]"
    )
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="tokens of a completion [100]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds, after one warm-up round [3]")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="functions to list [0: none]")
    own, flags = parser.parse_known_args()
    sizes = [
        "--max-prompt-length", str(PROMPT), "--max-completion-length", str(own.tokens),
        "--vllm-max-num-seqs", str(max(own.sequences)),
    ]  # fmt: skip
    args = made_up.parse([*sizes, *flags], 1)
    initialize_distributed(args)
    engine = VllmColocate(args, families.for_args(args).hf_from_args(args))
    scheduler, clock = scheduler_of(engine._engine), Clock(engine)
    sampling = Sampling(own.tokens, args.temperature, log_probs=True)
    possible = getattr(scheduler, "has_decode_steps", False)
    if not possible:
        print_rank_0("this engine has no decode steps: both rows of a pair are vLLM's own scheduler")
    from megatron_grpo.rollout.vllm.decode_steps import AT_ONCE  # after the engine has imported vLLM

    runner, several = engine.decode_runner, "several tokens at once"
    paths = ["vLLM's", "decode steps", *(["and its runner", several] if runner else [])]
    takes = getattr(scheduler, "takes_several", None)
    heads = ["sequences", "scheduler", *PARTS, "all three", "of a sequence", "step, CPU", "step, wall"]
    print_rank_0("us of a step, or of one of its several tokens:\n")
    print_rank_0(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for sequences in own.sequences:
        found: dict[str, list[np.ndarray]] = {name: [] for name in paths}
        for _ in range(own.rounds + 1):
            for name, rounds in found.items():
                scheduler.has_decode_steps = possible and name != "vLLM's"
                if runner:
                    runner.enabled = name in paths[2:]
                    scheduler.takes_several = takes if name == several else lambda ids: False
                steps = clock.rollout(engine, sequences, sampling)
                rounds.append(steps / AT_ONCE if name == several else steps)
        for name, rounds in found.items():
            steps = np.concatenate(rounds[1:])
            parts, host = np.median(steps, axis=0), np.median(steps[:, : len(PARTS)].sum(axis=1))
            cells = [*parts[: len(PARTS)], host, None, *parts[len(PARTS) :]]
            texts = [f"{host / sequences:.2f}" if cell is None else f"{cell:,.0f}" for cell in cells]
            print_rank_0(f"| {sequences:,} | {name} | {' | '.join(texts)} |")
    if own.functions:
        scheduler.has_decode_steps = possible
        profile = cProfile.Profile()
        profile.runcall(clock.rollout, engine, own.sequences[-1], sampling)
        pstats.Stats(profile).sort_stats("tottime").print_stats(own.functions)
    engine.close()


if __name__ == "__main__":
    run(main)
