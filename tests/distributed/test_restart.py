"""A run that torchrun or a scheduler starts again goes on by itself, to the very same end; so does a preempted one."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from disturbed import WORKER, disturbed_flags
from ranks import REPO, run_torchrun
from run_files import metrics_of, without

from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.parallel.initialize import free_port

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def flags(tiny_models, tmp_path_factory) -> list[str]:
    return disturbed_flags(tiny_models["qwen3"], tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory) -> list[dict]:
    save = tmp_path_factory.mktemp("undisturbed")
    run_torchrun(2, "pretrain_grpo.py", *flags, "--save", save)
    return rows(save)


def rows(save: Path) -> list[dict]:
    return without(metrics_of(save))


def attempt(launch: str, kind: str, flags, save, check=True):
    """Start the run, as an attempt of a launch; rank 1 is disturbed in the first one."""
    words = [WORKER, 1, kind, *flags, "--save", save]
    return run_torchrun(2, *words, check=check, env={"TORCHELASTIC_RUN_ID": launch})


def test_a_launch_that_is_started_again_goes_on_from_its_newest_checkpoint(flags, undisturbed, tmp_path):
    killed = attempt("job 7", "killed", flags, tmp_path, check=False)
    assert killed.returncode != 0 and latest_iteration(tmp_path) == 2
    other = attempt("job 8", "killed", flags, tmp_path, check=False)  # another launch must say what it wants
    assert f"--save {tmp_path} holds the checkpoint of iteration 2 of another run: add --load" in other.stdout
    again = attempt("job 7", "killed", flags, tmp_path)
    assert f"this launch has saved in --save {tmp_path} before" in again.stdout
    assert f"resumed from {tmp_path} at iteration 2" in again.stdout
    assert rows(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_signal_in_a_rollout_saves_the_state_before_it_and_leaves(flags, undisturbed, tmp_path):
    words = [*flags, "--exit-signal-handler", "--exit-grace-seconds", "600"]
    left = attempt("job 7", "signal", words, tmp_path)
    assert (
        f"left the rollout: SIGTERM (--exit-signal-handler). The run is saved at iteration 1: --load {tmp_path}"
        in left.stdout
    )
    assert (tmp_path / "preempted").exists()
    again = attempt("job 7", "signal", words, tmp_path)
    assert f"resumed from {tmp_path} at iteration 1" in again.stdout
    assert rows(tmp_path) == undisturbed
    assert not (tmp_path / "preempted").exists()


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop", "restore"])
def test_a_gradient_that_is_not_finite(action, flags, undisturbed, tmp_path):
    """One rank has it, before the gradients are reduced; update 3 of 4, and a checkpoint of update 2."""
    run = attempt("job 7", "nan", [*flags, "--on-bad-update", action], tmp_path, check=action != "stop")
    assert (run.returncode != 0) == (action == "stop")
    assert "update 3 is bad: the gradient norm is nan" in run.stdout
    assert RolloutBatch.load(tmp_path / "bad_updates" / "iteration_0000003").num_completions == 8
    done = rows(tmp_path)
    assert done[:2] == undisturbed[:2]
    if action == "stop":
        assert "The newest checkpoint is iteration 2" in run.stdout and len(done) == 2
        (tmp_path / "none").mkdir()  # as of a run whose first update is bad
        words = [tmp_path / "bad_updates" / "iteration_0000003", *flags, "--save", tmp_path]
        words += ["--load", tmp_path / "none"]
        output = run_torchrun(2, "tools/replay_update.py", *words).stdout
        assert "nan; the initial weights, because --load has no checkpoint" in output
        return
    assert "model and optimizer are those of the checkpoint of iteration 2 again" in run.stdout
    assert [row["update/skipped"] for row in done] == [0, 0, 1, 0]
    assert done[3]["grad_norm"] > 0 and latest_iteration(tmp_path) == 4
    # The weights are those after update 2, so the rollout of update 3 is on-policy, and so is that of update 4.
    assert done[3]["mismatch/mean_abs"] < 1e-5 and done[3]["consumed/prompts"] == undisturbed[3]["consumed/prompts"]
    replayed(flags, tmp_path, undisturbed[2])


def replayed(flags, save: Path, expected: dict) -> None:
    """Repeat update 3 with the weights of update 2; then with an advantage that makes the gradient's norm overflow."""
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    file = save / "bad_updates" / "iteration_0000003"
    words = ["tools/replay_update.py", file, *flags, "--load", save, "--save", save]
    lines = run_torchrun(2, *words).stdout.splitlines()
    start = lines.index("update 3: the gradient norm is nan; weights of iteration 2")
    table = [line.split() for line in lines[start + 2 : start + 10]]
    assert sorted(int(row[0]) for row in table) == list(range(8))
    loss, norm = map(
        float, re.search(r"the update: loss (\S+), gradient norm (\S+); 0 of 8", lines[start + 10]).groups()
    )
    assert norm == pytest.approx(expected["grad_norm"], rel=1e-4) and loss == pytest.approx(expected["loss"], abs=1e-6)
    assert sum(float(row[4]) for row in table) == pytest.approx(loss, abs=1e-5)
    norms = [float(row[5]) for row in table]
    assert norms == sorted(norms, reverse=True) and sum(norms) >= norm >= 0.0

    batch = RolloutBatch.load(file)
    batch.advantages[5] = 3e38
    for part in file.iterdir():
        part.unlink()
    batch.save(file / "00000.npz")
    output = run_torchrun(2, *words).stdout
    assert re.search(r"grad norm\n +5 .*(nan|inf)\n", output) and "; 1 of 8 completions not finite" in output


@pytest.mark.slow
def test_at_the_end_of_the_grace_a_blocked_rank_leaves_without_a_save(flags, tmp_path):
    words = [*flags, "--exit-signal-handler", "--exit-grace-seconds", "1"]
    left = attempt("job 7", "deaf", words, tmp_path, check=False)
    assert left.returncode == 1 and latest_iteration(tmp_path) is None
    assert not list(tmp_path.glob("iter_*"))


@pytest.mark.slow
def test_torchrun_starts_the_ranks_of_two_agents_again(flags, undisturbed, tmp_path):
    """Two agents on one machine stand for two nodes; a rank of the second one is killed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=two"]
    command += [str(REPO / WORKER), "1", "killed", *flags, "--save", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    agents = []
    for number in range(2):
        with open(tmp_path / f"agent{number}.log", "w") as log:
            agents.append(
                subprocess.Popen(
                    command, cwd=REPO, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
    try:
        codes = [agent.wait(timeout=600) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    output = "".join((tmp_path / f"agent{number}.log").read_text() for number in range(2))
    assert codes == [0, 0], output
    assert f"resumed from {tmp_path} at iteration 2" in output
    assert rows(tmp_path) == undisturbed
