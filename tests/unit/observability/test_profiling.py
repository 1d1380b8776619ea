"""What --profile records, and what is refused."""

import gzip
import json
import re

import pytest
import torch

from megatron_grpo.observability.arguments import check_profiling
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.observability.profiling import Profiler, summary
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.errors import GrpoError

RECORD = "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 3"


def run(args, rank, updates, begin=0):
    """Updates of one matrix product each, of another size every time."""
    profiler, timers = Profiler(args, rank, begin), Timers()
    for iteration in range(begin + 1, updates + 1):
        with timers("update"):
            torch.ones(iteration, 5) @ torch.ones(5, 5)
        profiler.after(iteration)
    profiler.close()


def phases(directory):
    """Ranges of the update phase in the trace."""
    with gzip.open(directory / "profile" / "rank0.trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    assert "aten::mm" in names
    return names.count("phase/update")


def test_the_updates_between_the_steps_are_recorded(tmp_path):
    run(parse_args(["--save", str(tmp_path), *RECORD.split()]), 0, 5)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["rank0.trace.json.gz", "rank0.txt"]
    assert phases(tmp_path) == 2
    text = (tmp_path / "profile" / "rank0.txt").read_text()
    assert text.startswith("updates 2 to 3\n") and re.search(r"^update +\d+\.\d+ s in 2 calls$", text, re.M)
    assert "aten::mm" in text


def event(category, name, begin, duration, thread=1):
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, "tid": thread}


def test_tables_of_a_trace_with_a_device():
    """Times in microseconds, added up by hand."""
    lines = summary(
        [
            {"ph": "M", "name": "process_name"},
            event("user_annotation", "phase/update", 0, 10_000_000),
            event("cpu_op", "aten::linear", 1_000_000, 3_000_000),
            event("cpu_op", "aten::mm", 1_500_000, 1_000_000),
            event("cpu_op", "aten::mm", 1_600_000, 500_000, thread=2),  # another thread: called by nobody
            event("kernel", "gemm", 2_000_000, 4_000_000, thread=7),
            event("kernel", "nccl_all_gather", 5_000_000, 2_000_000, thread=8),  # one second beside gemm
            event("gpu_memcpy", "copy", 9_500_000, 1_000_000, thread=7),  # half of it after the phase
        ]
    )
    assert lines[0].split() == (
        "update 10.000 s in 1 calls, device busy 5.500 s (communication 2.000), idle 4.500".split()
    )
    rows = {line.split()[-1]: line.split()[:3] for line in lines if "%" in line}
    assert rows["gemm"] == ["4000.000", "1", "57.1%"]
    assert rows["copy"] == ["1000.000", "1", "14.3%"]
    assert rows["aten::linear"] == ["2000.000", "1", "57.1%"]
    assert rows["aten::mm"] == ["1500.000", "2", "42.9%"]


def test_other_ranks_and_other_updates_are_not(tmp_path):
    args = parse_args(["--save", str(tmp_path), *RECORD.split()])
    run(args, 1, 5)
    run(args, 0, 5, begin=2)  # resumed within the range: what is left of it is another thing
    assert list(tmp_path.iterdir()) == []
    run(args, 0, 2)  # ended within the range: what there is is written
    assert phases(tmp_path) == 1
    run(parse_args(["--save", str(tmp_path), "--profile-ranks", "1", *RECORD.split()]), 1, 3)
    assert (tmp_path / "profile" / "rank1.txt").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-pytorch-profiler", "--use-pytorch-profiler needs --profile"),
        ("--profile-step-end 5", "--profile-step-end needs --profile"),
        ("--profile --use-pytorch-profiler", "needs --save"),
        ("--profile --save s --use-pytorch-profiler --profile-step-start 12", r"\(12\) must be .* less than .* \(12\)"),
        ("--profile --save s --use-pytorch-profiler --train-iters 8", r"at most --train-iters \(8\)"),
        ("--profile --save s", "add --use-pytorch-profiler"),
    ],
)
def test_what_is_refused(flags, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GrpoError, match=message):
        check_profiling(parse_args(flags.split()))


def test_what_is_accepted():
    check_profiling(parse_args([]))
    check_profiling(parse_args(["--save", "s", "--train-iters", "12", "--profile", "--use-pytorch-profiler"]))
