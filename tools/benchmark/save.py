"""Measure saves of a checkpoint: stall of the training, seconds until it is published, and host memory; and a load.

    torchrun --nproc-per-node GPUS tools/benchmark/save.py DIRECTORY [--saves 3] [FLAGS OF pretrain_grpo.py]

Saves random weights with Adam's moments, first in the foreground, then in the background (--async-save), and loads the
last one. Prints a Markdown table of rank 0: medians of all saves but the first, which allocates memory. On a busy
machine compare the CPU seconds of the stall, which the memory's sampling adds to a little. Host memory is
the growth of the rank's resident memory (anonymous and shared) during the save, at its peak; of the background process
its whole resident memory, in which the shared one counts again. The directory needs room for two checkpoints.
"""

import argparse
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import made_up  # first: it prepares for machines without a GPU

# isort: split
import psutil
import torch
import torch.distributed as dist

from megatron_grpo.checkpointing import checkpoint, checkpoint_directory
from megatron_grpo.parallel.initialize import initialize_distributed
from megatron_grpo.training.entry_point import run
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.log import print_rank_0

DEFAULTS = """--model-family qwen3 --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16
    --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --normalization RMSNorm --swiglu
    --disable-bias-linear --vocab-size 151936 --max-position-embeddings 4096 --bf16 --use-distributed-optimizer
    --num-generations 8 --global-batch-size 64 --micro-batch-size 1 --max-completion-length 64 --beta 0""".split()
GB = 1e9


class Memory:
    """Context that samples this process's resident memory: ``growth`` and ``child`` are peaks in bytes."""

    def __enter__(self) -> "Memory":
        self.before, self.growth, self.child = self._resident(), 0, 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        children = [c for c in psutil.Process().children() if "background_writer" in " ".join(c.cmdline())]
        while not self._done.wait(0.02):
            self.growth = max(self.growth, self._resident() - self.before)
            for child in children:
                self.child = max(self.child, child.memory_info().rss)

    @staticmethod
    def _resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def timed(function, *arguments) -> float:
    """Return the seconds that a function takes on the slowest rank."""
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    function(*arguments)
    dist.barrier()
    return time.perf_counter() - start


def measure(args, trainer, saves: int, asynchronous: bool) -> dict[str, float]:
    """Save several times; return the medians of all saves but the first."""
    args = replaced(args, async_save=asynchronous)
    rows = []
    for number in range(saves):
        with Memory() as memory:
            parts = trainer.model, trainer.optimizer, trainer.scheduler
            cpu = time.process_time()
            stall = timed(checkpoint.save_checkpoint, args, number + 1, *parts, {})
            cpu = time.process_time() - cpu
            whole = stall + timed(checkpoint.wait_for_background)
        rows.append({"stall": stall, "cpu": cpu, "whole": whole, "growth": memory.growth, "child": memory.child})
        print_rank_0(f"{'background' if asynchronous else 'foreground'} {number + 1}: {stall:.2f} s, {whole:.2f} s")
    return {name: median(row[name] for row in rows[1:]) for name in rows[0]} | {"first": rows[0]["stall"]}


def main() -> None:
    """Parse the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="folder for the checkpoints; it is deleted")
    parser.add_argument("--saves", type=int, default=3, metavar="N", help="saves of each kind, at least two [3]")
    options, flags = parser.parse_known_args()
    place = ["--save", str(options.directory), "--load", str(options.directory), "--max-checkpoints-to-keep", "1"]
    args = made_up.parse([*DEFAULTS, *flags, *place], int(os.environ.get("WORLD_SIZE", "1")))
    initialize_distributed(args)
    trainer = made_up.trainer(args)
    rows = {"foreground": measure(args, trainer, options.saves, False)}
    checkpoint.start_background_saves()
    time.sleep(20)  # its imports are no part of a save
    rows["background"] = measure(args, trainer, options.saves, True)
    directory = checkpoint_directory.find(args.save)[1]
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    load = timed(checkpoint.load_checkpoint, args, trainer.model, trainer.optimizer, trainer.scheduler)
    print_rank_0(f"\n{size / GB:.2f} GB on {dist.get_world_size()} ranks; load with checksums {load:.2f} s\n")
    print_rank_0(
        "| save | stall s | its CPU s | first | published after s | GB/s | rank grows by GB | background process GB |"
    )
    print_rank_0("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, row in rows.items():
        cells = [
            row["stall"],
            row["cpu"],
            row["first"],
            row["whole"],
            size / GB / row["whole"],
            row["growth"] / GB,
            row["child"] / GB,
        ]
        print_rank_0(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    ratio, cpu = (rows["background"][name] / rows["foreground"][name] for name in ("stall", "cpu"))
    print_rank_0(f"\nstall of the background save: {ratio:.1%}, of its CPU time {cpu:.1%}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(options.directory)


if __name__ == "__main__":
    run(main)
