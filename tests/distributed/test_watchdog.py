"""A rank hangs, in several ways: the run names it with its phase, writes the stacks of all ranks, and ends."""

import os
import re
import time

import pytest
from disturbed import WORKER, disturbed_flags
from ranks import REPO, real_torchrun, run_torchrun

from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def flags(tiny_models, tmp_path_factory) -> list[str]:
    return disturbed_flags(tiny_models["qwen3"], tmp_path_factory.mktemp("inputs"))


def stacks(save) -> dict[str, str]:
    (directory,) = save.glob("hang-*")
    return {file.name: file.read_text() for file in directory.iterdir()}


# Limits that no phase of a busy machine exceeds, and a short interval: no phase 'export' takes place. With them all
# limits are two seconds as soon as the rank is disturbed.
LIMITS = ["--watchdog-timeout", 600, "--watchdog-phase-timeouts", '{"export": 4}']


def test_a_stopped_rank_is_named_with_its_phase(flags, tmp_path):
    """The limit that the stopped rank published last is 600 s: the other rank knows better, from the board."""
    words = [*flags, "--save", tmp_path, *LIMITS]
    run = run_torchrun(2, WORKER, 1, "stopped", *words, check=False)
    assert run.returncode in (1, -9)  # of the first rank that ended: the stopped one was killed
    message = re.search(
        r"the run hangs: rank 1 \(host \S+, process \d+: T \(stopped\)\) has been in 'update: backward' for (\d+) s; "
        r"the others wait in 'update: (.*?)' \(rank 0\)\. .* Stacks of all ranks: (\S+)/\. "
        r"The newest checkpoint is iteration 2: --load (\S+) resumes from it",
        run.stdout,
    )
    assert message, run.stdout
    assert 2 <= int(message[1]) < 600
    assert message[2] in ("reduction of the gradients", "backward", "optimizer")
    assert message[3].startswith(f"{tmp_path}/hang-") and message[4] == str(tmp_path)
    assert latest_iteration(tmp_path) == 2
    files = stacks(tmp_path)
    assert set(files) == {"rank0.txt", "rank1.txt"}
    assert "in pretrain" not in files["rank1.txt"] and "state: T (stopped)" in files["rank1.txt"]
    assert re.search(r"File .*/pretrain_grpo\.py\", line \d+ in train", files["rank0.txt"])  # a waiting rank's stack
    assert re.search(r"File .*/torch/distributed/", files["rank0.txt"])


@pytest.mark.slow
def test_a_stopped_rank_of_four_and_the_report_of_torchrun(flags, tmp_path):
    words = [*flags, "--save", tmp_path, *LIMITS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    began = time.monotonic()
    command = [str(REPO / WORKER), 2, "stopped", *words]
    status, output = real_torchrun(4, list(map(str, command)), environment, timeout=300)
    assert status == 1, output
    found = "rank 2 \\(host \\S+, process \\d+: T \\(stopped\\)\\) has been in 'update: backward' for (\\d+) s"
    assert re.search(found, output), output
    cause = output.rpartition("Root Cause (first observed failure):")[2]
    assert re.search(found, cause), f"{time.monotonic() - began}: {output}"
    assert set(stacks(tmp_path)) == {f"rank{rank}.txt" for rank in range(4)}


@pytest.mark.slow
def test_a_rank_that_keeps_pythons_lock_writes_its_stack(flags, tmp_path):
    words = [*flags, "--save", tmp_path, *LIMITS]
    run = run_torchrun(2, WORKER, 0, "locked", *words, check=False)
    assert run.returncode in (1, -9)
    assert re.search(r"rank 0 \(host \S+, process \d+: S \(sleeping\)\) has been in 'update: backward'", run.stdout)
    assert re.search(r"File .*/disturbed_worker\.py\", line \d+ in disturbed_step", stacks(tmp_path)["rank0.txt"])


@pytest.mark.slow
def test_an_engine_that_hangs(flags, tmp_path):
    words = [*flags, "--save", tmp_path, *LIMITS]
    run = run_torchrun(2, WORKER, 1, "engine", *words, check=False)
    assert run.returncode == 1
    assert re.search(
        r"rank 1 \(host \S+\) has been in 'rollout' for \d+ s, at \S+disturbed_worker\.py:\d+ \(disturbed_poll\); "
        r"the others wait in '(scoring|rollout)' \(rank 0\).*There is no checkpoint: start the run again",
        run.stdout,
    ), run.stdout


@pytest.mark.slow
def test_a_long_rollout_is_no_hang(flags, tmp_path):
    """Each rollout takes 1.2 s and more on one rank, and a single step 0.2 s."""
    limits = '{"start": 300, "rollout": 1, "scoring": 1}'
    words = [*flags, "--save", tmp_path, "--watchdog-timeout", 60, "--watchdog-phase-timeouts", limits]
    run = run_torchrun(2, WORKER, 1, "slow", *words)
    assert "hangs" not in run.stdout and latest_iteration(tmp_path) == 4
