"""Faults of a run on GPUs: its launcher is killed, or a rank stops. Nothing stays behind, and the rank is named."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launch import HANGS, REPO, engine_flags, own_gpu
from run_files import metrics_of
from test_runs import GPU, RUN, task  # noqa: F401, the fixture

pytestmark = pytest.mark.alone  # it counts the memory of its GPU


@contextlib.contextmanager
def started(task: Path, save: Path, nproc: int, *flags: str) -> Iterator[tuple[subprocess.Popen, list[psutil.Process]]]:
    """Context of a run of many updates: torchrun, and the processes that it has after the second update."""
    data = [
        "--train-data-path",
        task / "data/train.jsonl",
        "--valid-data-path",
        task / "data/test.jsonl",
        "--external-plugins",
        REPO / "tools/benchmark/even_tokens.py",
    ]
    words = [*RUN, *GPU, *engine_flags(64), *data, "--load-hf", task / "qwen3", "--save", save, *flags]
    words = list(map(str, words))
    for name in ("--train-iters", "--exit-interval", "--eval-interval"):
        words[words.index(name) + 1] = "100000"
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        + [str(REPO / "pretrain_grpo.py"), *words],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        | ({"CUDA_VISIBLE_DEVICES": own_gpu()} if nproc == 1 else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        seen = ""
        while not re.search("iteration +2/", seen):
            line = torchrun.stdout.readline()
            assert line, seen[-8000:]
            seen += line
        yield torchrun, psutil.Process(torchrun.pid).children(recursive=True)
    finally:
        torchrun.kill()  # its ranks end with it
        torchrun.wait()


def memory() -> int:
    """MiB in use on this worker's GPU, by all programs."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={own_gpu()}"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_killed_launcher_leaves_nothing_on_the_gpu(task, tmp_path):
    before = memory()
    with started(task, tmp_path / "run", 1) as (_, processes):
        assert memory() - before > 1000
    killed = time.monotonic()
    _, left = psutil.wait_procs(processes, timeout=60)
    assert not left
    print(f"all {len(processes)} processes ended after {time.monotonic() - killed:.2f} s")
    assert memory() - before < 100


@pytest.mark.gpus(2)
def test_a_stopped_rank_is_named_while_the_other_waits_in_nccl(task, tmp_path):
    flags = "--watchdog-timeout", "20", "--save-interval", "2"
    with started(task, tmp_path / "run", 2, *flags) as (torchrun, processes):
        parents = [p.pid for p in processes if p.ppid() == torchrun.pid]
        rank = next(p for p in processes if p.environ().get("RANK") == "1" and p.ppid() in parents)
        rank.send_signal(signal.SIGSTOP)
        output = torchrun.communicate(timeout=HANGS)[0]
    assert torchrun.returncode
    assert re.search(r"the run hangs: rank 1 \(host \S+, process \d+: T \(stopped\)\) has been in '", output), output
    (directory,) = (tmp_path / "run").glob("hang-*")
    assert {file.name for file in directory.iterdir()} == {"rank0.txt", "rank1.txt"}
    assert not psutil.wait_procs(processes, timeout=60)[1]
    rows = metrics_of(tmp_path / "run")
    assert len(rows) >= 2
