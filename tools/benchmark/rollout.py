"""Measure completion tokens per second of our rollout and of vLLM's `LLM.generate`, on the same prompts, in one run.

    torchrun --nproc-per-node 1 tools/benchmark/rollout.py --load-hf MODEL --prompts 64 --max-completion-length 128
    torchrun --nproc-per-node 1 tools/benchmark/rollout.py --model-family qwen3 ... --bf16   # random weights

Both use the same engine with the same settings and kernels: on a GPU those of attention, sampling and log-probabilities
may be ours. Ours is all of `collect_rollout`: requests, polling, decoding, a trivial reward in worker processes, and
the exchange of the batch between ranks. The two alternate in each round, with and without log-probabilities; all
completions have the same length (--ignore-eos). Flags that are not in --help are those of pretrain_grpo.py. Prints a
Markdown table: medians over rounds, and the median of the ratios of the speeds. CPU time is that of rank 0's process,
without the reward workers, over the tokens of all replicas. With --kernels N one more rollout of ours is profiled: the
N kinds of kernels with the largest time are listed.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.data.tokenizer import build_tokenizer
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel.initialize import host_group, initialize_distributed
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rollout.collect import collect_rollout
from megatron_grpo.rollout.plan import RolloutPlan
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.rollout.vllm.scheduler import scheduler_of
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.weights import families
from tools import made_up

REWARD = """
from megatron_grpo.rewards.registry import register_reward

@register_reward("length")
def length(sample):
    return len(sample.token_ids)
"""


class Numbers:
    """Tokenizer for random models: decodes ids as numbers."""

    def decode(self, ids) -> str:
        """Return the ids as text."""
        return " ".join(map(str, ids))


class Benchmark:
    """One engine, used by `collect_rollout` and by `LLM.generate`."""

    def __init__(self, args, num_prompts: int, prompt_length: int, plugin: Path):
        self.args = args = replaced(args, tokenizer_model=args.load_hf)
        self.tokenizer = build_tokenizer(args) if args.load_hf else Numbers()
        self.engine = VllmColocate(args, families.for_args(args).hf_from_args(args))
        ids = np.random.default_rng(0).integers(3, args.vocab_size - 2, (num_prompts, prompt_length)).tolist()
        self.prompts = [Prompt(id=i, ids=prompt, row={}, source="made up") for i, prompt in enumerate(ids)]
        self.scorer = None
        if self.engine.is_lead:
            self.scorer = RewardPool(["length"], [str(plugin)], args.reward_workers, args.reward_timeout)

    def ours(self, sampling: Sampling) -> int:
        """Run a rollout as training does, after new weights; return the completion tokens of all replicas."""
        self.engine._llm.reset_prefix_cache()
        generations = self.args.num_generations
        plan = RolloutPlan(self.prompts, generations, sampling, seed=1)
        batch, failures = collect_rollout(self.engine, plan, self.scorer, self.tokenizer, Timers())
        assert failures == 0
        return int(batch.completion_lengths.sum())

    def stock(self, sampling: Sampling) -> int:
        """Call `LLM.generate` on this replica's share of the prompts; return the completion tokens of all replicas."""
        from vllm import SamplingParams

        scheduler = scheduler_of(self.engine._engine)
        own = self.prompts[self.engine.replica :: self.engine.num_replicas]
        prompts = [{"prompt_token_ids": p.ids} for p in own for _ in range(self.args.num_generations)]
        self.engine._llm.reset_prefix_cache()
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            ignore_eos=True,
            logprobs=0 if sampling.log_probs else None,
            detokenize=False,
        )
        update = type(scheduler).update_from_output.__get__(scheduler)
        with (  # without collect_log_probs and decode steps
            mock.patch.object(scheduler, "update_from_output", update),
            mock.patch.object(scheduler, "has_decode_steps", False, create=True),
        ):
            outputs = self.engine._llm.generate(prompts, params, use_tqdm=False)
        tokens = torch.tensor(sum(len(o.outputs[0].token_ids) for o in outputs) * self.engine.is_lead)
        dist.all_reduce(tokens, group=host_group())
        return int(tokens)


def measure(make: Callable[[], int]) -> tuple[float, float]:
    """Return tokens per second of ``make``, which returns its tokens, and this process's CPU time per token in us.

    The time ends when the last rank has finished.
    """
    dist.barrier(group=host_group())
    start, cpu = time.perf_counter(), time.process_time()
    tokens = make()
    cpu = time.process_time() - cpu
    dist.barrier(group=host_group())
    return tokens / (time.perf_counter() - start), 1e6 * cpu / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=int, default=64, metavar="N", help="prompts, each with --num-generations completions [64]"
    )
    parser.add_argument("--prompt-length", type=int, default=64, metavar="N", help="tokens of a prompt [64]")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds, after one warm-up round [5]")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="kinds of kernels to list [0: none]")
    own, flags = parser.parse_known_args()
    if own.kernels and not torch.cuda.is_available():
        parser.error("--kernels needs a GPU")
    args = made_up.parse(
        ["--max-prompt-length", str(own.prompt_length), *flags], world_size=int(os.environ.get("WORLD_SIZE", "1"))
    )
    initialize_distributed(args)
    with tempfile.TemporaryDirectory() as directory:
        plugin = Path(directory, "reward.py")
        plugin.write_text(REWARD)
        benchmark = Benchmark(args, own.prompts, own.prompt_length, plugin)
    print_rank_0(
        "| log-probabilities | ours, tokens/s | stock vLLM, tokens/s | ratio | ours, CPU us/token | stock vLLM |"
    )
    print_rank_0("|---|---|---|---|---|---|")
    for log_probs in (False, True):
        sampling = Sampling(args.max_completion_length, log_probs=log_probs)
        rounds = []
        for _ in range(own.rounds + 1):
            rounds.append([measure(partial(make, sampling)) for make in (benchmark.ours, benchmark.stock)])
        (ours, ours_cpu), (stock, stock_cpu) = np.median(rounds[1:], axis=0)
        ratio = median(ours[0] / stock[0] for ours, stock in rounds[1:])
        print_rank_0(
            f"| {'yes' if log_probs else 'no'} | {ours:,.0f} | {stock:,.0f} | {ratio:.3f} | {ours_cpu:.1f} "
            f"| {stock_cpu:.1f} |"
        )
    if own.kernels:
        sampling = Sampling(args.max_completion_length, log_probs=False)
        made_up.print_profile("rollout", partial(benchmark.ours, sampling), own.kernels)
    benchmark.engine.close()
    if benchmark.scorer:
        benchmark.scorer.close()


if __name__ == "__main__":
    run(main)
