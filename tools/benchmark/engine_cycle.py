"""Measure time and memory of a training-rollout cycle: offload, wake-up, weight sync, generation, sleep, reload.

    torchrun --nproc-per-node N tools/benchmark/engine_cycle.py --load-hf DIR --sleep-level 2 --offload-optimizer ...

Flags are those of pretrain_grpo.py, whose code runs the cycle, with any engine. Without --load-hf the weights are
random. The weight sync is compared with a plain copy of as many bytes, on the same device or, for servers, to the next
device. The optimizer state returns beside the next updates, which the cycle's seconds leave out. Prints a Markdown
table with the medians of all cycles but the first.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import numpy as np
import torch
import torch.distributed as dist

import pretrain_grpo
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.rollout.engine import Request, generate
from megatron_grpo.training.device_memory import DeviceMemory
from megatron_grpo.training.engine_lifecycle import EngineLifecycle
from megatron_grpo.training.entry_point import run
from megatron_grpo.training.offload import Offloader
from megatron_grpo.training.setup import build_engine
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.weights.stream import describe, stream_hf
from tools import made_up

STAGES = ("train", "sync", "rollout", "asleep", "offloaded")


def build(args) -> SimpleNamespace:
    """Build model, optimizer with its moments, and engine of a run."""
    parts = made_up.trainer(args)
    engine = build_engine(args, parts.model, SimpleNamespace(decode=None))
    state = Offloader(parts.model, parts.optimizer, False, args.offload_gradients, args.offload_optimizer)
    weights = Offloader(parts.model, parts.optimizer, args.offload_model, False, False)
    memory, step = DeviceMemory(args), pretrain_grpo.forward_step
    parts.lifecycle = EngineLifecycle(args, parts.model, step, engine, state, weights, Timers(), memory)
    return parts


def no_probe() -> NoReturn:
    """Refuse to probe the engine."""
    raise GrpoError(
        "--check-weight-sync probes the engine with the data of a run, which this tool has not: leave it out"
    )


def cycle(args, trainer: SimpleNamespace) -> dict[str, float]:
    """Run two updates and one rollout; return ``time/...`` and ``memory/...`` of the rollout."""
    made_up.two_updates(args, trainer, made_up.rollout(args))
    trainer.iteration += 1
    ids = np.random.default_rng(0).integers(3, args.vocab_size, (16, 8)).tolist()
    sampling = Sampling(16)
    lifecycle, engine = trainer.lifecycle, trainer.lifecycle.engine
    lifecycle.timers.collect()
    with lifecycle.awake(trainer.iteration, no_probe), lifecycle.timers("rollout"):
        requests = [Request(i, prompt, sampling) for i, prompt in enumerate(ids)] if engine.replica is not None else []
        with engine.rollout(seed=1):
            done = list(generate(engine, requests))
        assert len(done) == len(requests) and all(set(c.weight_versions) == {trainer.iteration} for c in done)
    dist.barrier()
    return lifecycle.timers.collect() | lifecycle.memory


def gathering(args, trainer: SimpleNamespace) -> float:
    """Return the seconds of iterating over the weight stream, without the engine's part of the sync."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in stream_hf(trainer.model, args):
        pass
    torch.cuda.synchronize()
    return time.perf_counter() - start


def copying(size: int, to_next: bool) -> float:
    """Return the seconds of a plain copy of ``size`` bytes on the device, or to the next device."""
    here = torch.cuda.current_device()
    there = here + 1 if to_next and here + 1 < torch.cuda.device_count() else here
    block = torch.empty(min(size, 2**31), dtype=torch.uint8, device=here)
    target = torch.empty_like(block, device=there)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(block)
        torch.cuda.synchronize()
        torch.cuda.synchronize(there)
        seconds.append(time.perf_counter() - start)
    return min(seconds) * size / len(block)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cycles", type=int, default=5, metavar="N", help="cycles; the first one does not count [5]")
    options, flags = parser.parse_known_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = made_up.parse(["--global-batch-size", str(8 * world), *flags], world)
    initialize_distributed(args)
    trainer = build(args)
    rows = [cycle(args, trainer) for _ in range(options.cycles)]
    row = {name: median(one.get(name, 0.0) for one in rows[1:]) for name in rows[-1]}
    size = sum(tensor.shape.numel() * tensor.dtype.itemsize for tensor in describe(args))
    gathered = gathering(args, trainer)
    to_next = args.weight_sync_method in ("nccl", "sparse")
    row["plain copy"] = copying(size, to_next) if torch.cuda.is_available() else float("nan")
    columns = {
        "GB": f"{size / 1e9:.2f}",
        "sync s": f"{row['time/sync']:.3f}",
        "first": f"{rows[0]['time/sync']:.2f}",
        "GB/s": f"{size / 1e9 / row['time/sync']:.0f}",
        "stream alone s": f"{gathered:.3f}",
        "plain copy s": f"{row['plain copy']:.3f}",
        "offload, reload s": f"{row.get('time/offload', 0):.2f}",
        "whole turn s": f"{row['time/step']:.2f}",
        **{f"GiB, {stage}": f"{row.get(f'memory/{stage}', 0):.1f}" for stage in STAGES},
    }
    for line in (columns.keys(), ["--:"] * len(columns), columns.values()):
        print_rank_0("| " + " | ".join(line) + " |")
    if args.weight_sync_method == "sparse" and dist.get_rank() == 0:
        print(f"| {trainer.lifecycle.engine._transfer.sent_elements:,} elements of {size // 2:,} sent last |")
    trainer.lifecycle.close()


if __name__ == "__main__":
    run(main)
