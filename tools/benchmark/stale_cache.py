"""Measure the cost of keys and values of old weights: `--weight-update keep` against `interrupt`.

    python tools/benchmark/stale_cache.py --load-hf BEFORE --after AFTER --data rows.jsonl [flags of pretrain_grpo.py]

BEFORE and AFTER are Hugging Face directories of one model, one update apart. vLLM samples completions with the weights
BEFORE. After --steps engine steps it gets BEFORE + s (AFTER - BEFORE), for each s of --times, and the running
completions go on: with their old keys and values (keep), or with new ones (interrupt).

Prints a Markdown table over the tokens that were sampled after the update: the mean and the largest
|log p(sampled) - log p(new weights)| in nats, the effective sample size of the weights p(new weights) / p(sampled), and
for comparison the mean of |log p(new weights) - log p(old weights)|, the update's own effect.
"""

import argparse
import json
import os
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_up
import numpy as np
import torch

import pretrain_grpo
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.end_of_turn import end_token_ids
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.data.tokenizer import build_tokenizer
from megatron_grpo.models import forward
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.parallel.initialize import initialize_distributed, set_random_seed
from megatron_grpo.rewards.pool import GroupMember
from megatron_grpo.rollout.collect import everything, exchange, to_batch
from megatron_grpo.rollout.engine import InterruptibleEngine, Request, generate
from megatron_grpo.rollout.plan import training_sampling
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.setup import build_engine
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.weights import hf
from megatron_grpo.weights.stream import stream_hf

OLD, NEW = 1, 2  # versions of the weights
HEAD = """| times | `--weight-update` | tokens | mean | largest | effective sample size | of the update itself |
|--:|---|--:|--:|--:|--:|--:|"""


class Weights:
    """The weights of a model before and after an update, and all others on the line through both."""

    def __init__(self, args: Namespace, after: str):
        self._model = forward.build_model(args, model_provider)
        self._args = args
        hf.load_hf(self._model, args, after)
        self._after = [parameter.detach().clone() for parameter in self._parameters()]
        hf.load_hf(self._model, args, args.load_hf)
        self._before = [parameter.detach().clone() for parameter in self._parameters()]

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self._model for parameter in chunk.parameters()]

    @torch.no_grad()
    def update(self, times: float) -> None:
        """Set the model to the weights after ``times`` the update."""
        for parameter, before, after in zip(self._parameters(), self._before, self._after, strict=True):
            parameter.copy_(before + times * (after - before))

    def send(self, engine: InterruptibleEngine, version: int) -> None:
        """Load the model's present weights into the engine."""
        engine.update_weights(stream_hf(self._model, self._args), version)

    def log_probs(self, batch: RolloutBatch) -> np.ndarray:
        """Return the log-probabilities ``[total]`` of a rollout under the model's present weights."""
        # The number of completions is not a multiple of the micro-batch size.
        one_by_one = replaced(self._args, micro_batch_size=1, max_tokens_per_microbatch=None)
        return forward.log_probs(one_by_one, self._model, pretrain_grpo.forward_step, batch)


def sample(
    engine: InterruptibleEngine, weights: Weights, prompts: list[Prompt], sampling: Sampling, steps: int, keep: bool
) -> RolloutBatch:
    """Return a completion of each prompt; after ``steps`` the engine gets the model's present weights."""
    requests = [Request(p, prompts[p].ids, sampling) for p in range(engine.replica, len(prompts), engine.num_replicas)]
    with engine.rollout(1):
        engine.submit(requests)
        done = [completion for _ in range(steps) for completion in engine.poll()]
        left = [] if keep else engine.interrupt()
        weights.send(engine, NEW)
        continued = [Request(begun.id, prompts[begun.id].ids, sampling, begun) for begun in left]
        done += generate(engine, continued)
        while len(done) < len(requests):  # those that were kept
            done += engine.poll()
    members = {completion.id: GroupMember(completion.id, 0, 1) for completion in done}
    return exchange(to_batch(prompts, done if engine.is_lead else [], members, range(len(prompts)), 0), everything)


def line(times: float, keep: bool, batch: RolloutBatch, new: np.ndarray, old: np.ndarray) -> str:
    """Return the line of the table for one rollout and its log-probabilities under both weights."""
    after = (batch.weight_version == NEW) & (batch.response_mask == 1)
    assert after.any(), "every completion has ended before the update: give fewer --steps"
    difference = (new - batch.rollout_log_probs)[after].astype(np.float64)
    ratios = np.exp(difference)
    size = ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())
    gap, own = np.abs(difference), np.abs(new - old)[after].mean()
    name = "keep" if keep else "interrupt"
    return f"| {times:g} | `{name}` | {after.sum():,} | {gap.mean():.1e} | {gap.max():.1e} | {size:.5f} | {own:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--after", required=True, metavar="DIR", help="the model of --load-hf one update later")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help='JSON lines with a "prompt"')
    parser.add_argument("--prompts", type=int, default=512, metavar="N", help="completions, one a prompt [512]")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="engine steps before the update [8]")
    parser.add_argument("--times", type=float, nargs="+", default=[1, 10], metavar="S", help="size of it [1 10]")
    options, flags = parser.parse_known_args()
    args = made_up.parse(["--temperature", "1", *flags], world_size=int(os.environ.get("WORLD_SIZE", "1")))
    args = replaced(args, tokenizer_model=args.load_hf, weight_update="keep")  # without steps in flight at new weights
    initialize_distributed(args)
    set_random_seed(args.seed)
    tokenizer = build_tokenizer(args)
    rows = [json.loads(row) for row in options.data.read_text().splitlines()[: options.prompts]]
    prompts = [Prompt(i, tokenizer.encode(row["prompt"]), row, str(options.data)) for i, row in enumerate(rows)]
    args = replaced(args, end_token_ids=end_token_ids(args, tokenizer))
    weights, engine = Weights(args, options.after), build_engine(args, None, tokenizer)
    engine.wake_weights()
    engine.wake_cache()
    print_rank_0(HEAD)
    for times in options.times:
        for keep in (False, True):
            weights.update(0)
            weights.send(engine, OLD)
            weights.update(times)
            batch = sample(engine, weights, prompts, training_sampling(args, 1), options.steps, keep)
            new = weights.log_probs(batch)
            weights.update(0)
            print_rank_0(line(times, keep, batch, new, weights.log_probs(batch)))
    engine.close()


if __name__ == "__main__":
    run(main)
