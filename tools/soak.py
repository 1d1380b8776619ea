"""Run many updates on a CPU, and check that memory, descriptors and threads of all processes stay flat.

    python tools/soak.py runs/soak --updates 2000 [-- FLAGS OF pretrain_grpo.py]
    python tools/soak.py runs/soak --updates 500 --server
    python tools/soak.py runs/soak --updates 500 --server -- --lora-rank 4 --lora-weight-sync adapter

A tiny model learns one-digit arithmetic on two ranks, with evaluations, saves, resampled groups, a reference model,
and a second reward function that raises an error now and then. Every --every updates the tool prints for each process
of the run: live blocks (MiB, what the process has allocated and not freed), anonymous memory (MiB, with the free blocks
that glibc keeps), open descriptors and threads. At the end it prints the growth of each over the second half of the
run, by a straight line. The exit code is 1 if the live blocks of a process grow by more than --limit KiB an update, or
by a descriptor or a thread in 100 updates. Anonymous memory grows longer: glibc's free blocks lie between live ones
(docs/performance/memory.md).

Live blocks are glibc's own counters (mallinfo2), which a thread in every process writes into a file once a second. With
PYTHONMALLOC=malloc, which the tool sets, they include Python's objects. It also sets ONEDNN_PRIMITIVE_CACHE_CAPACITY=0:
oneDNN keeps up to 1,024 compiled products, one for each shape, which looks like a leak for hundreds of updates.

With --server a vLLM server generates and receives the weights, or the adapter, once an update; its processes are
measured, too. Flags after `--` come last, such as `--rollout-engine megatron`.
"""

import argparse
import contextlib
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_grpo.utils.errors import GrpoError
from tools import resume_check
from tools.cpu_server import cpu_server

REWARD = """
from megatron_grpo.rewards.registry import Sample, register_reward

@register_reward("sometimes")
def sometimes(sample: Sample) -> float:
    if sum(sample.token_ids) % 50 == 0:
        raise ValueError("this reward fails now and then")
    return 0.0
"""
FLAGS = """--transformer-impl local --num-generations 4 --global-batch-size 64 --micro-batch-size 16 --lr 1e-4
    --beta 0.02 --max-prompt-length 6 --max-completion-length 4 --reward-funcs exact_match sometimes
    --dynamic-sample --save-interval 50 --max-checkpoints-to-keep 2 --eval-interval 50 --no-save-hf"""
KINDS = ("live MiB", "MiB", "descriptors", "threads")
HEAP = """
import ctypes, os, threading, time

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Info

def write():
    file = os.open(os.path.join(os.path.dirname(__file__), str(os.getpid())), os.O_CREAT | os.O_WRONLY)
    while True:
        info = mallinfo2()
        os.pwrite(file, b"%20d" % (info.uordblks + info.hblkhd), 0)
        time.sleep(1)

def start():
    threading.Thread(target=write, daemon=True).start()

start()
os.register_at_fork(after_in_child=start)
"""


@dataclass
class Series:
    """Measurements of one process: updates done, and a row of KINDS for each."""

    name: str
    updates: list[int] = field(default_factory=list)
    rows: list[tuple[float, float, int, int]] = field(default_factory=list)

    def growth(self, after: int) -> np.ndarray:
        """Return the growth of each kind per update, by least squares over the measurements from update ``after``."""
        chosen = [(x, row) for x, row in zip(self.updates, self.rows, strict=True) if x >= after]
        if len(chosen) < 3:
            return np.full(len(KINDS), np.nan)
        return np.polyfit([x for x, _ in chosen], [row for _, row in chosen], 1)[0]


def measure(process: psutil.Process, heap: Path) -> tuple[float, float, int, int]:
    """Return live blocks and anonymous memory in MiB, descriptors and threads of a process."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    anonymous = next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    live = int((heap / str(process.pid)).read_text())
    return live / 2**20, anonymous / 1024, process.num_fds(), process.num_threads()


def family(run: resume_check.Run, server: int | None) -> dict[int, tuple[str, psutil.Process]]:
    """Return torchrun, its ranks, the server and their processes by process id, with a name for each."""
    torchrun = psutil.Process(run.process.pid)
    found = {torchrun.pid: ("torchrun", torchrun)}
    for number, rank in enumerate(torchrun.children()):
        found[rank.pid] = (f"rank {number}", rank)
        found |= {child.pid: (f"child of rank {number}", child) for child in rank.children(recursive=True)}
    if server is not None:
        parent = psutil.Process(server)
        found |= {child.pid: ("child of server", child) for child in parent.children(recursive=True)}
        found[server] = ("server", parent)
    return found


def soak(args: argparse.Namespace) -> bool:
    """Make the inputs, start the server of --server, and return the result of `watch`."""
    (args.directory / "sometimes.py").write_text(REWARD)
    flags = [*FLAGS.split(), *resume_check.make_inputs(args.directory), "--train-iters", str(args.updates)]
    flags += ["--external-plugins", str(args.directory / "sometimes.py")]
    heap = args.directory / "heap"
    heap.mkdir(exist_ok=True)
    (heap / "sitecustomize.py").write_text(HEAP)  # Python imports it at the start of every process
    os.environ |= {"PYTHONMALLOC": "malloc", "PYTHONPATH": f"{heap}:{os.environ.get('PYTHONPATH', '')}"}
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"
    with contextlib.ExitStack() as stack:
        server = None
        if args.server:
            words, settings = "--logprobs-mode processed_logprobs --max-model-len 32", {}
            if "--lora-rank" in args.flags:
                words, settings = f"{words} --enable-lora --max-lora-rank 8", {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
            started = cpu_server(args.directory / "model", args.directory / "server.log", words, **settings)
            url, server = stack.enter_context(started)
            flags += ["--vllm-mode", "server", "--vllm-server-base-url", url, "--vllm-server-timeout", "300"]
        return watch(args, [*flags, *args.flags], server)


def watch(args: argparse.Namespace, flags: list[str], server: int | None) -> bool:
    """Run, print the measurements and the growth, and return whether all is flat; ``server``: its process id."""
    run = resume_check.Run(args.directory / "run", flags, args.nproc_per_node)
    series: dict[int, Series] = {}
    print(f"{'update':>7}  {'process':16} {'live MiB':>9} {'MiB':>8} {'descriptors':>12} {'threads':>8}", flush=True)
    for update in range(args.every, args.updates + 1, args.every):
        if not run.wait_until(partial(has_rows, count=update), args.patience):
            break
        for pid, (name, process) in family(run, server).items():
            try:
                row = measure(process, args.directory / "heap")
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                continue
            one = series.setdefault(pid, Series(name))
            one.updates.append(update)
            one.rows.append(row)
            print(f"{update:7}  {name:16} {row[0]:9.2f} {row[1]:8.2f} {row[2]:12} {row[3]:8}", flush=True)
    run.finish(args.patience)
    flat = True
    print(f"growth over the second half, from update {args.updates // 2}:")
    for one in series.values():
        live, memory, descriptors, threads = one.growth(args.updates // 2) * (1024, 1024, 1, 1)
        print(
            f"  {one.name:16} live {live:+8.2f}, anonymous {memory:+8.2f} KiB an update, "
            f"{descriptors:+.4f} descriptors, {threads:+.4f} threads"
        )
        flat &= not (live > args.limit or descriptors > 0.01 or threads > 0.01)
    return flat


def has_rows(run: resume_check.Run, count: int) -> bool:
    """Return whether metrics.jsonl has the rows of so many updates."""
    return resume_check.count_rows(run) >= count


def main() -> int:
    """Parse the command line, soak, and return the exit code."""
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="new folder for the run")
    parser.add_argument("--updates", type=int, default=2000, metavar="N", help="updates [2000]")
    parser.add_argument("--every", type=int, default=100, metavar="N", help="updates between two measurements [100]")
    parser.add_argument("--nproc-per-node", type=int, default=2, metavar="N", help="ranks [2]")
    parser.add_argument(
        "--limit", type=float, default=4.0, metavar="X", help="growth of live blocks, KiB an update [4]"
    )
    parser.add_argument("--patience", type=float, default=1e5, metavar="X", help="time limit in seconds [100000]")
    parser.add_argument("--server", action="store_true", help="generate with a vLLM server that the tool starts")
    options = parser.parse_args(own)
    options.flags, options.directory = flags, options.directory.resolve()
    options.directory.mkdir(parents=True, exist_ok=True)
    try:
        return 0 if soak(options) else 1
    except GrpoError as error:
        print(f"soak.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
