"""Measure the parts of layers in an update at several sequence lengths: attention, delta nets or Mamba-2, MLPs.

    torchrun --nproc-per-node 1 tools/benchmark/layer_parts.py --lengths 1024 8192 32768 MODEL_FLAGS \\
        --max-tokens-per-microbatch 32768

Flags are those of pretrain_grpo.py; the weights are random. Every update has --tokens tokens, in completions of one
length. Milliseconds are those of the second update, forward and backward together, of one layer (mean over the layers
of a kind); with recomputation the second forward pass is in them. The rest of the update are embedding, head, norms,
residuals, optimizer and gradients. Prints a Markdown table. With --kernels N the N kernels of each length with the
largest time follow it.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

import pretrain_grpo
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.log import print_rank_0
from tools import made_up


class Times:
    """Times at which the device reaches marks in the passes of a module."""

    def __init__(self):
        self.marks: list[tuple[str, Any]] = []  # (begin or end, an event of the GPU, or seconds)

    def mark(self, name: str) -> None:
        """Add the device's time."""
        if not torch.cuda.is_available():
            self.marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((name, event))

    def milliseconds(self) -> float:
        """Return the sum from each "begin" to the next "end"."""
        total = 0.0
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        for (first, begin), (second, end) in pairs:
            assert (first, second) == ("begin", "end"), (first, second)
            total += 1e3 * (end - begin) if isinstance(end, float) else begin.elapsed_time(end)
        return total


class _Mark(torch.autograd.Function):
    """The identity; marks the time in the forward pass and in the backward pass."""

    @staticmethod
    def forward(ctx, x, times, name, name_in_backward):
        ctx.times, ctx.name = times, name_in_backward
        times.mark(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.times.mark(ctx.name)
        return gradient, None, None, None


def watch(module: torch.nn.Module) -> Times:
    """Mark begin and end of the passes of a module whose first argument and first result are hidden states."""
    times = Times()

    def before(_, args, more):
        if args:
            return (_Mark.apply(args[0], times, "begin", "end"), *args[1:]), more
        return args, more | {"hidden_states": _Mark.apply(more["hidden_states"], times, "begin", "end")}

    def after(_, args, result):
        return _Mark.apply(result[0], times, "end", "begin"), result[1]

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    return times


def watch_layers(model: list[torch.nn.Module]) -> dict[str, list[Times]]:
    """Return the times of all mixers and MLPs by their class."""
    found = defaultdict(list)
    for chunk in model:
        for name, module in chunk.named_modules():
            if name.rpartition(".")[2] in ("self_attention", "mlp") and hasattr(module, "config"):
                found[type(module).__name__].append(watch(module))
    return dict(found)


def measured(flags: list[str], options: argparse.Namespace, length: int) -> tuple[float, dict[str, list[float]]]:
    """Run two updates; return milliseconds of the second, those of each layer by its kind."""
    size = made_up.size_flags(options.tokens // length, length)
    args = made_up.parse([*size, *flags], int(os.environ.get("WORLD_SIZE", "1")))
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    found = watch_layers(trainer.model)
    batch, chosen = made_up.one_update(args, length)
    update = partial(pretrain_grpo.update, args, trainer, batch, chosen)
    for _ in range(2):
        for times in (times for of_kind in found.values() for times in of_kind):
            times.marks.clear()
        made_up.peak_memory(reset=True)
        whole = 1e3 * made_up.seconds(update)
    print_rank_0(f"{length} tokens: {whole:.1f} ms, {made_up.peak_memory() / 1024:.1f} GiB at most")
    parts = {kind: [times.milliseconds() for times in of_kind] for kind, of_kind in found.items()}
    if options.kernels:
        made_up.print_profile(f"update of sequences of {length} tokens", update, options.kernels)
    made_up.release(trainer)
    return whole, parts


def main() -> None:
    """Parse the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--lengths", nargs="+", type=int, required=True, metavar="N", help="tokens of a sequence")
    parser.add_argument("--tokens", type=int, default=65536, metavar="N", help="tokens of an update [65536]")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="kinds of kernels to list [0: none]")
    options, flags = parser.parse_known_args()
    if options.kernels and not torch.cuda.is_available():
        parser.error("--kernels needs a GPU")
    if options.tokens < 2 * max(options.lengths):
        parser.error(f"--tokens {options.tokens}: an update has at least two sequences of {max(options.lengths)}")
    rows = {length: measured(flags, options, length) for length in options.lengths}
    kinds = list(next(iter(rows.values()))[1])
    print_rank_0("\n| tokens | update ms | " + " | ".join(f"{kind} ms | share" for kind in kinds) + " | rest |")
    print_rank_0("|---" * (3 + 2 * len(kinds)) + "|")
    for length, (whole, parts) in rows.items():
        cells = [f"{sum(of) / len(of):.2f} x {len(of)} | {sum(of) / whole:.3f}" for of in parts.values()]
        rest = 1 - sum(map(sum, parts.values())) / whole
        print_rank_0(f"| {length} | {whole:.1f} | " + " | ".join(cells) + f" | {rest:.3f} |")


if __name__ == "__main__":
    run(main)
