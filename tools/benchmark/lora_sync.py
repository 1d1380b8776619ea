"""Measure the sync of a LoRA adapter against a full weight sync: seconds, operations, bytes, and the cost of the proof.

    torchrun --nproc-per-node N tools/benchmark/lora_sync.py --load-hf DIR --lora-rank 16 [flags of pretrain_grpo.py]

The engine is vLLM in these processes. It receives, in turn, all weights merged with the adapter, and the adapter alone,
whose sync is measured in its parts. With --merge-only there is no engine: the weights are merged, and not sent.
Without --load-hf the weights are random. Prints a Markdown table with the medians of all repetitions but the first.
Operations are calls of torch that are no views: on a GPU each launches one kernel, or a few for many tensors.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_up
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.lora.stream import stream_merged
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.weight_sync.adapter_sync import probe_adapter, sent_adapter
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.setup import build_engine
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.weights.stream import describe, stream_hf

HEAD = """| sync | MB | ms | of it: gather | load | read back and compare |
|---|--:|--:|--:|--:|--:|"""


class Operations(TorchDispatchMode):
    """Counts calls of torch that are no views and no transfers between processes."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not (function.is_view or str(function).startswith("c10d"))
        return function(*args, **kwargs or {})


def operations(call: Callable[[], object]) -> int:
    """Return the number of operations of a call."""
    with Operations() as counted:
        call()
    return counted.count


def read_all(stream: Callable, model, args) -> int:
    """Read a stream of weights to its end, without keeping one; return the number of tensors."""
    return sum(1 for _ in stream(model, args))


def merge_only(args, model, repeat: int) -> None:
    """Print what the merged weights cost beside the weights as they are."""
    print_rank_0("| weights | tensors | ms | operations of torch |\n|---|--:|--:|--:|")
    for name, stream in (("as they are", stream_hf), ("merged", stream_merged)):
        read = partial(read_all, stream, model, args)
        times = [made_up.seconds(read) for _ in range(repeat + 1)]
        tensors, count = read(), operations(read)
        print_rank_0(f"| {name} | {tensors:,} | {1e3 * median(times[1:]):,.1f} | {count:,} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--repeat", type=int, default=10, metavar="N", help="repetitions; the first is left out [10]")
    parser.add_argument("--merge-only", action="store_true", help="merge the weights, without an engine")
    options, flags = parser.parse_known_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    size = ["--global-batch-size", str(8 * world)]
    sync = [] if options.merge_only else ["--lora-weight-sync", "adapter"]
    args = made_up.parse([*size, *sync, *flags], world)
    initialize_distributed(args)
    model = made_up.trainer(args).model
    if options.merge_only:
        merge_only(args, model, options.repeat)
        return
    engine = build_engine(args, model, SimpleNamespace(decode=None))
    engine.wake_weights()
    engine.update_weights(stream_hf(model, args), 0)
    full, parts = [], []
    for _ in range(options.repeat + 1):
        full.append(made_up.seconds(lambda: engine.update_weights(stream_merged(model, args), 1)))
        adapter: dict[str, torch.Tensor] = {}
        gather = made_up.seconds(lambda into=adapter: into.update(sent_adapter(args, model)))
        load = made_up.seconds(lambda of=adapter: engine.update_adapter(of, 1))
        differences: list[str] = []
        check = made_up.seconds(lambda of=adapter, lines=differences: lines.extend(engine.compare_adapter(of)))
        assert not differences, differences
        parts.append((gather, load, check))
    counts = [
        operations(call)
        for call in (
            lambda: sent_adapter(args, model),
            lambda: engine.update_adapter(adapter, 1),
            lambda: engine.compare_adapter(adapter),
        )
    ]
    engine.wake_cache()
    probe = made_up.seconds(lambda: probe_adapter(engine))
    weights = sum(tensor.shape.numel() * tensor.dtype.itemsize for tensor in describe(args)) / 1e6
    factors = sum(tensor.nbytes for tensor in adapter.values()) / 1e6
    gather, load, check = (1e3 * median(column) for column in zip(*parts[1:], strict=True))
    merged, alone = 1e3 * median(full[1:]), gather + load + check
    print_rank_0(HEAD)
    print_rank_0(f"| all weights, merged | {weights:,.1f} | {merged:,.1f} | | | |")
    print_rank_0(
        f"| adapter, rank {args.lora_rank} | {factors:,.1f} | {alone:,.1f} | {gather:.1f} | {load:.1f} | {check:.1f} |"
    )
    print_rank_0(f"| operations of torch | | {sum(counts)} | {' | '.join(map(str, counts))} |")
    print_rank_0(f"| ratio | {weights / factors:,.0f} | {merged / alone:,.1f} | | | |")
    print_rank_0(f"\nThe probe of all kinds of layers, once at the start: {probe:.2f} s.")
    engine.close()


if __name__ == "__main__":
    run(main)
