"""Ends of a run under torchrun: the message with cause and cure, and its place in torchrun's report."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from ranks import REPO, gone, real_torchrun

WORKER = str(REPO / "tests" / "distributed" / "failing_worker.py")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}


def root_cause(*command):
    """Return (rank, exit code, text) of the root cause in the report of torchrun on two ranks."""
    status, output = real_torchrun(2, command, ENVIRONMENT, timeout=120)
    assert status == 1, output
    cause = output.rpartition("Root Cause (first observed failure):")[2]
    found = re.search(
        r"rank +: (\d)[^\n]*\n  exitcode +: (-?\d+)[^\n]*\n[^\n]*\n  traceback : (.*?)\n=+$", cause.rstrip(), re.DOTALL
    )
    assert found, output
    return int(found[1]), int(found[2]), found[3].strip()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind, rank", [("rank 1", 1), ("before", 0), ("everywhere", 0)])
def test_message_of_the_rank_that_failed(kind, rank):
    assert root_cause(WORKER, kind) == (rank, 1, "--lr is wrong: the cure")


@pytest.mark.slow
@pytest.mark.distributed
def test_traceback_of_a_defect():
    rank, code, text = root_cause(WORKER, "defect on rank 1")
    assert (rank, code) == (1, 1)
    assert text.startswith("Traceback") and text.endswith("ZeroDivisionError: a defect")


@pytest.mark.slow
@pytest.mark.distributed
def test_wrong_flag():
    message = "unknown flag --xyzzy; --help-all lists all flags"
    assert root_cause(str(REPO / "pretrain_grpo.py"), "--xyzzy") == (0, 2, message)


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="without fork_rank a signal has no message")
@pytest.mark.parametrize(
    "name, cause",
    [("SIGKILL", "when the memory of the host"), pytest.param("SIGABRT", "native code", marks=pytest.mark.slow)],
)
def test_a_rank_that_a_signal_ends(name, cause, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    rank, code, text = root_cause(WORKER, name, "--save", str(tmp_path))
    assert (rank, code) == (1, -signal.Signals[name])
    assert text.startswith(f"{name} ended rank 1 (process ") and cause in text
    assert text.endswith(f"The newest checkpoint is iteration 7: --load {tmp_path} resumes from it")
    status = json.loads((tmp_path / "status.json").read_text())  # by the parent of rank 0, which torchrun has ended
    assert (status["state"], status["error"]) == ("stopped", text)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="without fork_rank a signal has no message")
def test_the_parent_of_a_rank_is_killed(tmp_path):
    rank, code, text = root_cause(WORKER, "parent", "--save", str(tmp_path))
    assert (rank, code) == (1, -9)
    assert re.fullmatch(
        rf"SIGKILL ended process \d+, the parent of rank 1, .*--load {tmp_path} resumes from its newest checkpoint",
        text,
    )


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="without fork_rank a signal has no message")
@pytest.mark.parametrize(
    "name, times",
    [
        ("SIGINT", 2),
        ("SIGKILL", 1),
        ("SIGTERM", 1),
        ("SIGTERM", 2),
    ],
)
def test_a_signal_to_torchrun(name, times, tmp_path):
    """The ranks end, and the message is the last one before torchrun's traceback."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [WORKER, "waits", "--save", str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as torchrun:
        pids, lines, signals = [], [], 0
        for line in torchrun.stderr:
            lines.append(line)
            pids += re.findall(r"rank (\d+) waits", line)
            # The second one as soon as torchrun has begun to pass the first one on.
            if (len(pids) == 2 and signals == 0) or ("closing signal" in line and signals < times):
                torchrun.send_signal(signal.Signals[name])
                signals += 1
    assert gone(pids) and signals == times, lines
    # A second signal can come before torchrun has passed on the first; torchrun then sends SIGTERM.
    passed_on = f"({name}|SIGTERM)" if times == 2 else name
    what = "torchrun has ended, and the run with it" if name == "SIGKILL" else f"{passed_on} ended the run"
    message = re.compile(rf"failing_worker\.py: {what}\. There is no checkpoint: start the run again\n")
    printed = [number for number, line in enumerate(lines) if message.fullmatch(line)]
    assert len(printed) == 1, lines
    after = lines[printed[0] + 1 :]
    assert not after or (after[0].startswith("Traceback") and "SignalException" in after[-1]), after
