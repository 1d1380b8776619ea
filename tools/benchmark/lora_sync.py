"""Measure the sync of a LoRA adapter against a full weight sync: seconds, bytes, and the cost of the proof.

    torchrun --nproc-per-node N tools/benchmark/lora_sync.py --load-hf DIR --lora-rank 16 [flags of pretrain_grpo.py]

The engine is vLLM in these processes. It receives, in turn, all weights merged with the adapter, and the adapter alone,
whose sync is measured in its parts. Without --load-hf the weights are random. Prints a Markdown table with the medians
of all repetitions but the first.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_up
import torch

from megatron_grpo.lora.stream import stream_merged
from megatron_grpo.parallel.initialize import initialize_distributed, print_rank_0
from megatron_grpo.rollout.weight_sync.adapter_sync import probe_adapter, sent_adapter
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.setup import build_engine
from megatron_grpo.weights.stream import describe, stream_hf

HEAD = """| sync | MB | ms | of it: gather | load | read back and compare |
|---|--:|--:|--:|--:|--:|"""


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call, with the device's work."""
    _synchronize()
    start = time.perf_counter()
    call()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--repeat", type=int, default=10, metavar="N", help="repetitions; the first is left out [10]")
    options, flags = parser.parse_known_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    size = ["--global-batch-size", str(8 * world)]
    args = made_up.parse([*size, "--lora-weight-sync", "adapter", *flags], world)
    initialize_distributed(args)
    model = made_up.trainer(args).model
    engine = build_engine(args, model, SimpleNamespace(decode=None))
    engine.wake_weights()
    engine.update_weights(stream_hf(model, args), 0)
    full, parts = [], []
    for _ in range(options.repeat + 1):
        full.append(seconds(lambda: engine.update_weights(stream_merged(model, args), 1)))
        adapter: dict[str, torch.Tensor] = {}
        gather = seconds(lambda into=adapter: into.update(sent_adapter(args, model)))
        load = seconds(lambda of=adapter: engine.update_adapter(of, 1))
        differences: list[str] = []
        check = seconds(lambda of=adapter, lines=differences: lines.extend(engine.compare_adapter(of)))
        assert not differences, differences
        parts.append((gather, load, check))
    engine.wake_cache()
    probe = seconds(lambda: probe_adapter(engine))
    weights = sum(tensor.shape.numel() * tensor.dtype.itemsize for tensor in describe(args)) / 1e6
    factors = sum(tensor.nbytes for tensor in adapter.values()) / 1e6
    gather, load, check = (1e3 * median(column) for column in zip(*parts[1:], strict=True))
    merged, alone = 1e3 * median(full[1:]), gather + load + check
    print_rank_0(HEAD)
    print_rank_0(f"| all weights, merged | {weights:,.1f} | {merged:,.1f} | | | |")
    print_rank_0(
        f"| adapter, rank {args.lora_rank} | {factors:,.1f} | {alone:,.1f} | {gather:.1f} | {load:.1f} | {check:.1f} |"
    )
    print_rank_0(f"| ratio | {weights / factors:,.0f} | {merged / alone:,.1f} | | | |")
    print_rank_0(f"\nThe probe of all kinds of layers, once at the start: {probe:.2f} s.")
    engine.close()


if __name__ == "__main__":
    run(main)
