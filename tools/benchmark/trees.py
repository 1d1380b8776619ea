"""Measure updates on completions that begin alike, separate and with --share-prompts, by one process on one device.

    torchrun --nproc-per-node 1 tools/benchmark/trees.py --sizes 0.6b 4b [FLAGS]
    torchrun --nproc-per-node 1 tools/benchmark/trees.py --sizes tiny --updates 2

The models have the shapes of Qwen3 with random weights. FLAGS are further flags of pretrain_grpo.py, such as
``--attention-backend flash``. The lengths are made up, and stand in `CASES`:

    groups     groups of 8 completions of 512 tokens after a prompt of 1,350
    episodes   groups of 8 episodes of 8 turns. The template drops the thinking of past turns, so that each turn is a
               sequence of its own, which has the prompt and all earlier turns without their thinking in common with the
               others of its episode.
    agents     the conversations of a tree of agents, each a completion: an agent calls three others, with a copy of
               its conversation, each of which calls two; every caller goes on with the reports of those that it called

Each update is that of a run, with the optimizer's step and all other costs that sharing does not lower. The learning
rate is too small to change a weight, so that all updates have the same loss and gradient. For each case the last column
is (seconds saved / seconds) / (TFLOP saved / TFLOP) against separate sequences. TFLOP are those that the packs compute,
by `flops/update`, without padding. Seconds are the median of --updates after one that is left out; rows are printed as
soon as they are measured. With --kernels N one more update is profiled (`made_up.print_profile`).

One H200 has room for 4b, and measures it in less than 200 seconds with the start.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import numpy as np

import pretrain_grpo
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.prefix_tree import with_prefixes
from megatron_grpo.models import forward
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.log import print_rank_0
from tools import made_up

COMMON = """--transformer-impl local --model-family qwen3 --group-query-attention --qk-layernorm --normalization RMSNorm
    --norm-epsilon 1e-6 --swiglu --disable-bias-linear --rotary-base 1000000 --max-position-embeddings 40960
    --max-prompt-length 400 --max-completion-length 7792 --beta 0 --lr 1e-12 --global-batch-size 2 --num-generations 2
    --steps-per-generation 1 --share-prompts""".split()
_GPU = (
    "--bf16 --num-query-groups 8 --kv-channels 128 --vocab-size 151936 --bias-activation-fusion --bias-dropout-fusion"
)
# Of each size the flags, and how many groups, groups of episodes and trees an update has.
SIZES = {
    "0.6b": (
        f"{_GPU} --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 "
        "--max-tokens-per-microbatch 16384",
        (8, 3, 8),
    ),
    "4b": (
        f"{_GPU} --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 "
        "--untie-embeddings-and-output-weights --max-tokens-per-microbatch 8192",
        (4, 1, 2),
    ),
    "tiny": (
        "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --num-query-groups 2 "
        "--kv-channels 8 --vocab-size 64 --max-tokens-per-microbatch 8192",
        (1, 1, 1),
    ),
}

Tokens = list[tuple[int, bool]]  # (token, whether the policy sampled it)


class Text:
    """Random tokens."""

    def __init__(self, vocab_size: int):
        self.rng, self.vocab_size = np.random.default_rng(0), vocab_size

    def sampled(self, count: int) -> Tokens:
        """Return ``count`` tokens of the policy."""
        return [(token, True) for token in self.rng.integers(3, self.vocab_size, count).tolist()]

    def given(self, count: int) -> Tokens:
        """Return ``count`` tokens of a prompt, a tool or an agent."""
        return past(self.sampled(count))


def past(tokens: Tokens) -> Tokens:
    """Return the tokens without those in the loss."""
    return [(token, False) for token, _ in tokens]


Sequences = list[list[list[Tokens]]]  # [group][completion][sequence], which begins with the group's prompt


def groups(text: Text, count: int) -> Sequences:
    """Eight completions of 512 tokens after a prompt of 1,350."""
    found = []
    for _ in range(count):
        prompt = text.given(1350)
        found.append([[prompt + text.sampled(512)] for _ in range(8)])
    return found


def episodes(text: Text, count: int) -> Sequences:
    """Eight episodes of eight turns: 160 tokens of thinking, a call of 40, its result of 80; a prompt of 400."""
    found = []
    for _ in range(count):
        prompt, group = text.given(400), []
        for _ in range(8):
            before, turns = prompt, []
            for _ in range(8):
                thinking, call = text.sampled(160), text.sampled(40)
                turns.append(before + thinking + call)
                before = before + past(call) + text.given(80)
            group.append(turns)
        found.append(group)
    return found


def agents(text: Text, count: int) -> Sequences:
    """Ten conversations: 1,500 tokens of prompt, 250 of a plan, and the agents that it calls, in two levels.

    A called agent has a task of 120 tokens (those that it calls: 80), then turns with a call of 60 and its result of
    160 (three; those that it calls: two), then a report of 200. A caller reads reports of 100 and samples 250 more.
    """

    def called(before: Tokens, task: int, turns: int) -> Tokens:
        own = text.given(task)
        for _ in range(turns):
            own = own + text.sampled(60) + text.given(160)
        return before + own

    found = []
    for _ in range(count):
        plan = text.given(1500) + text.sampled(250)
        conversations = [plan + text.given(300) + text.sampled(250)]
        for _ in range(3):
            middle = called(past(plan), 120, 3)
            conversations.append(middle + text.given(200) + text.sampled(250))
            conversations += [called(past(middle), 80, 2) + text.sampled(200) for _ in range(2)]
        found.append([[conversation] for conversation in conversations])
    return found


CASES = {"groups": groups, "episodes": episodes, "agents": agents}
PROMPTS = {"groups": 1350, "episodes": 400, "agents": 1500}
WAYS = ("separate", "shared")


def rollout(name: str, text: Text, count: int) -> RolloutBatch:
    """Return the completions of a case, with random advantages."""
    found = CASES[name](text, count)
    prompts, completions, masks, starts, group_ids = [], [], [], [], []
    for number, completion in ((number, own) for number, group in enumerate(found) for own in group):
        whole = [token for sequence in completion for token in sequence][PROMPTS[name] :]
        prompts.append([token for token, _ in completion[0][: PROMPTS[name]]])
        completions.append([token for token, _ in whole])
        masks.append([int(sampled) for _, sampled in whole])
        ends = np.cumsum([len(sequence) for sequence in completion[:-1]], dtype=np.int64) - PROMPTS[name]
        starts.append(ends.tolist())
        group_ids.append(number)
    n = len(prompts)
    batch = RolloutBatch.from_completions(
        prompts,
        completions,
        log_probs=[[-4.0] * len(own) for own in completions],
        weight_version=0,
        group_ids=group_ids,
        row_ids=group_ids,
        sample_ids=list(range(n)),
        finish_reasons=[FinishReason.STOP] * n,
        response_masks=masks,
        sample_starts=starts if any(starts) else None,
    )
    batch.advantages = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    batch.rewards = batch.advantages[:, None]
    return batch


def measured(args, trainer, batch: RolloutBatch, way: str, options: argparse.Namespace, title: str) -> list[float]:
    """Run updates; return seconds, peak GiB, tokens computed, their TFLOP, loss and gradient norm."""
    args = replaced(args, share_prompts=way != "separate")
    chosen, rows, seconds = np.arange(batch.num_completions), [], []

    def update() -> None:
        rows.append(pretrain_grpo.update(args, trainer, batch, chosen))

    made_up.peak_memory(reset=True)
    for _ in range(1 + options.updates):
        seconds.append(made_up.seconds(update))
    peak = made_up.peak_memory() / 1024
    if options.kernels:
        made_up.print_profile(title, update, options.kernels)
    packs, row = len(forward.assignment(args, batch, chosen)[0]), rows[-1]
    print_rank_0(f"\n{title}: {', '.join(f'{spent:.3f}' for spent in seconds)} s; {packs} micro-batches")
    tokens = row["tokens/update"] - row["tokens/shared"]
    return [median(seconds[1:]), peak, tokens, row["flops/update"], row["loss"], row["grad_norm"]]


def main() -> None:
    """Parse the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--sizes", nargs="+", default=["0.6b", "4b"], choices=SIZES, help="models [0.6b 4b]")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="[all]")
    parser.add_argument("--updates", type=int, default=2, metavar="N", help="measured updates of each [2]")
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="kernels of a profile to list [0: no profile]"
    )
    options, flags = parser.parse_known_args()
    started = time.perf_counter()
    head = "| model | case | way | update s | peak GiB | tokens | TFLOP | TFLOP/s | loss | gradient norm | quotient |"
    lines = [head, "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for size in options.sizes:
        of_size, counts = SIZES[size]
        args = made_up.parse([*COMMON, *of_size.split(), *flags], 1)
        initialize_distributed(args)
        trainer = made_up.trainer(args)
        for case in options.cases:
            # With the hashes of prefixes, as a rollout of engines has it.
            batch = with_prefixes(rollout(case, Text(args.vocab_size), counts[list(CASES).index(case)]))
            whole: list[float] = []
            for way in WAYS:
                found = measured(args, trainer, batch, way, options, f"{size} {case} {way}")
                whole = whole or found
                seconds, peak, tokens, flops, loss, norm = found
                quotient = "" if way == "separate" else f"{(1 - seconds / whole[0]) / (1 - flops / whole[3]):.2f}"
                cells = f"{seconds:.3f} | {peak:.1f} | {tokens:,} | {flops:.1f} | {flops / seconds:.0f}"
                lines.append(f"| {size} | {case} | {way} | {cells} | {loss:.5f} | {norm:.4f} | {quotient} |")
                print_rank_0(f"{lines[-1]}\n{time.perf_counter() - started:.0f} s since the command line was read")
        made_up.release(trainer)
    print_rank_0("\n" + "\n".join(lines))


if __name__ == "__main__":
    run(main)
