"""What --profile records, and what is refused."""

import gzip
import json
import re

import pytest
import torch
from full_disk import files_up_to

from megatron_grpo.observability.arguments import check_profiling
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.observability.profiling import Phase, Profiler, kernels_and_operators, phases
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


def recorded(directory):
    """Ranges of the update phase in the trace."""
    with gzip.open(directory / "profile" / "rank0.trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    assert "aten::mm" in names
    return names.count("phase/update")


def test_the_updates_between_the_steps_are_recorded(tmp_path):
    run(parse_args(["--save", str(tmp_path), *RECORD.split()]), 0, 5)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "rank0.phases.json",
        "rank0.trace.json.gz",
        "rank0.txt",
    ]
    assert recorded(tmp_path) == 2
    text = (tmp_path / "profile" / "rank0.txt").read_text()
    assert text.startswith("updates 2 to 3\n") and re.search(r"^update +\d+\.\d+ s in 2 calls$", text, re.M)
    assert "aten::mm" in text
    content = json.loads((tmp_path / "profile" / "rank0.phases.json").read_text())
    assert content["updates"] == [2, 3] and [phase["name"] for phase in content["phases"]] == ["update"]
    assert content["phases"][0]["calls"] == 2 and content["phases"][0]["busy"] is None  # no device


def test_a_full_disk_ends_no_run(tmp_path, capsys):
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank0.txt").symlink_to("/dev/full")
    run(parse_args(["--save", str(tmp_path), *RECORD.split()]), 0, 5)
    assert re.search(r"\[rank 0\] the profile cannot be written to .*No space left", capsys.readouterr().out)


def test_a_profile_that_fills_the_disk_leaves_its_room_to_others(tmp_path, capsys):
    with files_up_to(1_000):  # the trace is longer
        run(parse_args(["--save", str(tmp_path), *RECORD.split()]), 0, 5)
    assert (
        f"cannot be written to {tmp_path}/profile: its trace is not whole, as on a full disk" in capsys.readouterr().out
    )
    assert not list((tmp_path / "profile").iterdir())


def event(category, name, begin, seconds, thread=1, launch=None):
    args = {} if launch is None else {"args": {"correlation": launch}}
    return {"ph": "X", "cat": category, "name": name, "ts": begin * 1e6, "dur": seconds * 1e6, "tid": thread} | args


# Seconds: a phase from 0 to 10 on whose device something runs from 2 to 7 and from 9.5 on.
TRACE = [
    event("user_annotation", "phase/update", 0, 10),
    event("cpu_op", "aten::linear", 1, 3),
    event("cpu_op", "aten::mm", 1.5, 1),
    event("cpu_op", "aten::mm", 1.6, 0.5, thread=2),  # another thread: called by nobody
    event("cuda_runtime", "cudaLaunchKernel", 1.25, 0.25, launch=1),
    event("kernel", "gemm", 2, 4, thread=7, launch=1),
    event("cuda_driver", "cuLaunchKernelEx", 1.5, 0.25, launch=2),
    event("kernel", "ncclDevKernel_AllGather", 5, 2, thread=8, launch=2),  # one second beside gemm
    event("cuda_runtime", "cudaMemcpyAsync", 8, 0.75, launch=3),
    event("gpu_memcpy", "copy", 9.5, 1, thread=7, launch=3),  # half of it after the phase
]


def test_the_device_in_a_phase():
    """Idle from 0 to 2, of which 1.5 until the launch has returned, and from 7 to 9.5, of which 1.75."""
    assert phases(TRACE) == [
        Phase("update", 1, 10.0, communication=2.0, only_communication=1.0, busy=5.5, waiting=3.25, idle=1.25)
    ]
    assert phases(TRACE)[0].line().split() == (
        "update 10.000 s in 1 calls: busy 5.500 (communication 2.000, 1.000 of it alone), "
        "waiting for launches 3.250, idle otherwise 1.250".split()
    )


def test_phases_without_a_next_kernel_wait_for_launches():
    scoring = event("user_annotation", "phase/scoring", 11, 3)
    assert phases([*TRACE, scoring])[1] == Phase("scoring", 1, 3.0, 0.0, 0.0, 0.0, waiting=3.0, idle=0.0)


def test_kernels_launched_ahead_do_not_wait():
    ahead = [event("cuda_runtime", "cudaLaunchKernel", 0, 1, launch=n) for n in (1, 2)]
    run = [event("kernel", "k", begin, 1, thread=7, launch=n) for n, begin in ((1, 1), (2, 3))]
    (phase,) = phases([event("user_annotation", "phase/update", 1, 3), *ahead, *run])
    assert (phase.busy, phase.waiting, phase.idle) == (2.0, 0.0, 1.0)


def tables(trace):
    """The rows of each table: seconds, calls, microseconds a call, share."""
    parts = [part.splitlines() for part in "\n".join(kernels_and_operators(trace)).strip().split("\n\n")]
    return {title.split("share  ")[1]: {row.split()[-1]: row.split()[:4] for row in rows} for title, *rows in parts}


def test_tables_of_kernels_and_operators():
    found = tables(TRACE)
    assert found["kernel"]["gemm"] == ["4.000000", "1", "4000000.0", "57.1%"]
    assert found["kernel"]["copy"] == ["1.000000", "1", "1000000.0", "14.3%"]
    operators = found["operator, CPU time of its own"]
    assert operators["aten::linear"] == ["2.000000", "1", "2000000.0", "57.1%"]
    assert operators["aten::mm"] == ["1.500000", "2", "750000.0", "42.9%"]


def test_the_phases_with_most_time_in_kernels_have_tables_of_their_own():
    """A kernel belongs to the phase in which it begins; the long phase without kernels has no table."""
    spans = {"idle": [(20, 90)], "rollout": [(10, 11), (12, 14)], "sync": [(14, 15)], "eval": [(15, 16)]}
    trace = [event("user_annotation", f"phase/{name}", a, b - a) for name, calls in spans.items() for a, b in calls]
    trace += [event("kernel", "decode", begin, 0.75) for begin in (13.75, 10, 12.5, 11.5)]  # 11.5: in no phase
    trace += [event("kernel", "broadcast", 14.5, 0.25), event("kernel", "decode", 15.5, 0.2)]
    found = tables([*trace, *TRACE])
    assert list(found) == ["kernel", *(f"kernel in {name}" for name in ("update", "rollout", "sync")), *list(found)[4:]]
    assert found["kernel in rollout"] == {"decode": ["2.250000", "3", "750000.0", "100.0%"]}
    assert found["kernel in sync"] == {"broadcast": ["0.250000", "1", "250000.0", "100.0%"]}
    assert set(found["kernel in update"]) == {"gemm", "ncclDevKernel_AllGather", "copy"}
    assert found["kernel"]["decode"][:2] == ["3.200000", "5"]


def test_a_trace_without_a_device_has_tables_of_operators_only():
    host = [one for one in TRACE if one["cat"] in ("user_annotation", "cpu_op")]
    assert list(tables(host)) == ["operator, CPU time of its own"]


def test_other_ranks_and_other_updates_are_not(tmp_path):
    args = parse_args(["--save", str(tmp_path), *RECORD.split()])
    run(args, 1, 5)
    run(args, 0, 5, begin=2)  # resumed within the range: what is left of it is another thing
    assert list(tmp_path.iterdir()) == []
    run(args, 0, 2)  # ended within the range: what there is is written
    assert recorded(tmp_path) == 1
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
