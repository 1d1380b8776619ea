"""Measure the offload of the trainer's tensors to host memory: device memory, seconds, copy rate, and overlap.

The copy rate is compared with that of one large copy in the same run. The last table has what an update takes alone,
and together with the return of the optimizer state: before it, or in the background of it as in a run.

    torchrun --nproc-per-node GPUS tools/benchmark/offload.py [--large-copy-gib 4] [FLAGS OF pretrain_grpo.py]

Defaults: random weights with the architecture of Qwen3-0.6B in bf16, distributed optimizer. One update on random
completions creates all state. All processes copy at the same time; the tables show rank 0.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_up
import numpy as np
import torch
import torch.distributed as dist

import pretrain_grpo
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.training.offload import Offloader, Transfer
from megatron_grpo.utils.device import device
from megatron_grpo.utils.log import print_rank_0

DEFAULTS = """--model-family qwen3 --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16
    --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --normalization RMSNorm --swiglu
    --disable-bias-linear --vocab-size 151936 --max-position-embeddings 4096 --bf16 --use-distributed-optimizer
    --num-generations 8 --global-batch-size 64 --max-completion-length 512 --max-tokens-per-microbatch 8192
    --beta 0""".split()
GIB = 2**30


def updated_policy(flags: list[str]) -> tuple[SimpleNamespace, Callable[[], object]]:
    """Return a policy after one update, with all optimizer state, and a function that runs another update."""
    args = made_up.parse(DEFAULTS + flags, int(os.environ.get("WORLD_SIZE", "1")))
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    update = partial(pretrain_grpo.update, args, trainer, made_up.rollout(args), np.arange(args.global_batch_size))
    update()
    return trainer, update


def large_copy(gib: float) -> tuple[float, float]:
    """Return GiB/s of one large copy of page-locked memory, (from the device, to the device): best of three."""
    there = torch.zeros(int(gib * GIB), dtype=torch.uint8, device=device())
    here = torch.empty(there.shape, dtype=torch.uint8, pin_memory=device().type == "cuda")
    rates = []
    for target, source in ((here, there), (there, here)):
        seconds = []
        for _ in range(3):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        rates.append(gib / min(seconds))
    return rates[0], rates[1]


def memory() -> str:
    """Return torch's allocated and reserved memory and the device's free memory, in GiB, as table cells."""
    if device().type == "cpu":
        return f"{'-':>10}{'-':>10}{'-':>10}"
    values = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    return "".join(f"{value / GIB:10.2f}" for value in values)


def row(name: str, transfer: Transfer | None = None, limit: float = 0.0) -> None:
    text = f"{name:20}{memory()}"
    if transfer is not None:
        rate = transfer.copied / GIB / transfer.seconds
        text += f"{transfer.size / GIB:10.2f}{transfer.copied / GIB:10.2f}{transfer.seconds:10.3f}"
        text += f"{rate:10.2f}{limit:10.2f}{rate / limit:8.2f}"
    print_rank_0(text)


def overlap(state: Offloader, update: Callable[[], object]) -> None:
    """Print the seconds of updates, and of updates before or beside which ``state`` returns."""

    def returns(background: bool) -> None:
        state.to_device(background)
        update()

    seconds: dict[str, list[float]] = {"update alone": [], "return, then update": [], "return beside update": []}
    for _ in range(3):
        seconds["update alone"].append(made_up.seconds(update))
        for name, background in (("return, then update", False), ("return beside update", True)):
            state.to_host()
            seconds[name].append(made_up.seconds(partial(returns, background)))
    alone = median(seconds["update alone"])
    print_rank_0("optimizer state: median seconds, and those above the update alone")
    for name, values in seconds.items():
        print_rank_0(f"{name:22}{median(values):8.3f}{median(values) - alone:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--large-copy-gib", type=float, default=4.0, metavar="X", help="size of the one large copy, GiB [4]"
    )
    options, flags = parser.parse_known_args()
    trainer, update = updated_policy(flags)
    down, up = large_copy(options.large_copy_gib)
    torch.cuda.empty_cache()
    count = sum(parameter.numel() for chunk in trainer.model for parameter in chunk.parameters())
    where = torch.cuda.get_device_name() if device().type == "cuda" else "CPU (copies within host memory)"
    print_rank_0(f"{where}, {dist.get_world_size()} processes, {count / 1e9:.3f} B parameters a process; GiB, s, GiB/s")
    titles = "allocated reserved free moved copied seconds rate limit".split()
    print_rank_0(f"{'':20}" + "".join(f"{title:>10}" for title in titles) + f"{'ratio':>8}")
    weights = Offloader(trainer.model, trainer.optimizer, weights=True, gradients=False, optimizer_state=False)
    state = Offloader(trainer.model, trainer.optimizer, weights=False, gradients=True, optimizer_state=True)
    row("before")
    for name in ("first", "second", "third"):  # the first offload allocates host memory
        for kind, offloader in (("state", state), ("weights", weights)):
            dist.barrier()
            row(f"{name} out, {kind}", offloader.to_host(), down)
        for kind, offloader in (("weights", weights), ("state", state)):
            dist.barrier()
            row(f"{name} back, {kind}", offloader.to_device(), up)
    print_rank_0(f"page-locked host memory: {(weights.host_bytes + state.host_bytes) / GIB:.2f} GiB a process")
    overlap(state, update)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
