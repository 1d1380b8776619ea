"""Measure what tools cost: rollouts of several turns with a tool of one second, with an instant one, and of one turn.

    torchrun --nproc-per-node 1 tools/benchmark/tools_cost.py --environment quick_tool --max-turns 4 \
        --external-plugins tools/benchmark/even_tokens.py tools/benchmark/slow_tool.py FLAGS_OF_PRETRAIN_GRPO
    SCRIPT=tools/benchmark/tools_cost.py bash tools/benchmark/step.sh local runs/tools --max-completion-length 1024 \
        --vllm-max-num-seqs 256 --environment quick_tool --max-turns 4 \
        --external-plugins tools/benchmark/even_tokens.py tools/benchmark/slow_tool.py

Each of --max-turns turns has --max-completion-length / --max-turns tokens; give --ignore-eos. The three kinds
alternate, in one process and with one engine. Flags that are not in --help are those of pretrain_grpo.py. Prints a
Markdown table: the median of each kind's seconds, and of its ratios to one turn of all tokens in the same round.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_grpo
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.models.gpt import model_provider
from megatron_grpo.rollout.engine import Request
from megatron_grpo.rollout.episodes import Episodes
from megatron_grpo.rollout.source import WholeRollouts
from megatron_grpo.rollout.vllm.colocate import VllmColocate
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.setup import setup
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import print_rank_0

KINDS = {"one turn": None, "instant tool": "quick_tool", "tool of 1 s": "slow_tool"}


def of_turn(request: Request, tokens: int) -> Request:
    """Return the request of an episode for at most ``tokens`` beyond those that it has begun with."""
    if not request.row:
        return request
    begun = request.begun.num_sampled if request.begun is not None else 0
    most = min(request.sampling.max_tokens, begun + tokens)
    return replace(request, sampling=replace(request.sampling, max_tokens=most))


def of_kind(prompt: Prompt, environment: str | None) -> Prompt:
    """Return the prompt with the environment; without a row no environment answers."""
    return replace(prompt, row={**prompt.row, "environment": environment} if environment else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds, after one warm-up round [3]")
    own, flags = parser.parse_known_args()
    args = parse_args(flags)
    trainer = setup(args, model_provider, pretrain_grpo.forward_step)
    if trainer is None:  # after --dry-run
        return
    source = trainer.source
    if type(source) is not WholeRollouts or not isinstance(source.engine, Episodes):
        raise GrpoError(
            "tools_cost.py measures whole rollouts of an engine on the trainer's ranks, with --environment: give it; "
            "leave out --agent, --rollout-ranks, --partial-rollouts and --replay-rollouts"
        )
    engine, tokens = source.engine._engine, args.max_completion_length // args.max_turns
    submit = engine.submit

    def submit_turns(requests: Iterable[Request]) -> None:
        submit([of_turn(request, tokens) for request in requests])

    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with trainer.engine_for_rollout(), mock.patch.object(engine, "submit", submit_turns):
        for number in range(own.rounds + 1):
            source.taken += 1
            plan = source.plan()
            for kind, environment in KINDS.items():
                prompts = [of_kind(prompt, environment) for prompt in plan.prompts]
                if isinstance(engine._engine, VllmColocate):  # the kinds have the same prompts, and two the same turns
                    engine._engine._llm.reset_prefix_cache()
                start = time.perf_counter()
                batch = source.evaluate(replace(plan, prompts=prompts))
                seconds[kind].append(time.perf_counter() - start)
                sampled, turns = batch.response_lengths.mean(), batch.turns.mean() if environment else 1
                print_rank_0(
                    f"round {number}, {kind}: {seconds[kind][-1]:.2f} s, {sampled:.1f} tokens in {turns} turns"
                )
    print_rank_0("| rollout | s | ratio | beyond one turn, s |\n|---|--:|--:|--:|")
    alone = seconds["one turn"][1:]
    for kind, found in seconds.items():
        ratio = median(a / b for a, b in zip(found[1:], alone, strict=True))
        beyond = median(a - b for a, b in zip(found[1:], alone, strict=True))
        print_rank_0(f"| {kind} | {median(found[1:]):.2f} | {ratio:.3f} | {beyond:.2f} |")
    trainer.lifecycle.close()
    source.close()


if __name__ == "__main__":
    run(main)
