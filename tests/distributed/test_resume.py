"""Runs that were killed, stopped, or started again in another layout; tools/resume_check.py in small."""

import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import ranks

from megatron_grpo.checkpointing.checkpoint_directory import latest_iteration, publish, start
from tools import resume_check
from tools.resume_check import Moment, Reference, differences, read_rows, saving

# The checkpoints: 2, 4, 6, and those of both ends. The learning rate falls from the second update on.
UPDATES, STOP = 7, 5


class ForkedRun(resume_check.Run):
    """A run without torchrun, whose ranks are forked: see tests/helpers/warm_rank.py."""

    def __init__(self, save, flags, nproc=2):
        def start(command, env, stdout, **_):
            script = next(place for place, word in enumerate(command) if word.endswith("pretrain_grpo.py"))
            return ranks.WarmRun(nproc, command[script:], ranks._environment() | env, stdout.name)

        ranks.start_warm_ranks()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resume_check.subprocess, "Popen", start)
            super().__init__(save, flags, nproc)

    def kill(self):
        if self.process.poll() is not None:
            return False
        self.process.kill()
        self.process.wait()
        return True


@pytest.fixture(scope="module", autouse=True)
def launcher():
    """Runs are forked; with --thorough they are started, and killed, as tools/resume_check.py does it."""
    with pytest.MonkeyPatch.context() as patch:
        if not ranks.thorough:
            patch.setattr(resume_check, "Run", ForkedRun)
            patch.setattr(resume_check.subprocess, "run", run_tool)
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    """Seven updates, undisturbed; a checkpoint after every second one."""
    root = tmp_path_factory.mktemp("resume")
    job = f"{resume_check.COMMON} {resume_check.JOBS['one update']}"
    words = f"{job} --train-iters {UPDATES} --lr-warmup-iters 1 --global-batch-size 32".split()
    words += ["--vllm-engine-kwargs", json.dumps({"kv_cache_memory_bytes": 2**25})]  # it is written at each start
    return resume_check.make_reference(root / "undisturbed", [*words, *resume_check.make_inputs(root)])


def run_tool(command, **_):
    status, output = ranks.warm_ranks(1, command[1:], ranks._environment(), resume_check.TIME_LIMIT)
    return subprocess.CompletedProcess(command, status, output)


def killed(reference, name: str, *more: str) -> resume_check.Run:
    """The same with more flags: killed while saving, after a row that no checkpoint has yet, and started again.

    It saves in the background; the reference does not.
    """
    flags = [*reference.flags, *more, "--async-save"]
    save = reference.save.with_name(name)
    assert resume_check.Run(save, flags).kill_at(saving(4, delay=random.Random(1).uniform(0, 0.05)))
    assert latest_iteration(save) >= 2
    assert 3 in iterations(save)
    return resume_check.Run(save, flags).finish()


@pytest.fixture(scope="module")
def stopped(reference) -> resume_check.Run:
    """The same with --exit-interval, killed on its way there."""
    return killed(reference, "stopped", "--exit-interval", str(STOP))


def iterations(save: Path) -> list[int]:
    return [row["iteration"] for row in read_rows(save / "metrics.jsonl")]


# By default test_restart.py has the same end of a run that was killed, with the Megatron engine, and
# test_environment_runs.py that of one that was stopped, with vLLM.
@pytest.mark.distributed
@pytest.mark.vllm
@pytest.mark.slow
def test_killed_while_saving_it_goes_on_to_the_very_same_end(reference):
    run = killed(reference, "killed")
    assert run.resumed_from >= 2
    assert latest_iteration(run.save) == UPDATES
    assert differences(run.save, reference.save) == []


# By default tests/unit/training/test_sampling_resume.py has --exit-interval.
@pytest.mark.distributed
@pytest.mark.vllm
@pytest.mark.slow
def test_exit_interval_saves_and_ends_the_run_wherever_it_began(stopped, reference):
    assert stopped.resumed_from >= 2
    assert latest_iteration(stopped.save) == STOP
    assert iterations(stopped.save) == list(range(STOP + 1))
    assert (stopped.save / "hf_model" / "model.safetensors").exists()
    # Half the run has the first half's rows: the learning rate goes by --train-iters, not by where the run stops.
    expected = read_rows(reference.save / "metrics.jsonl")[STOP]
    row = read_rows(stopped.save / "metrics.jsonl")[STOP]
    assert [row[key] for key in ("lr", "loss", "grad_norm")] == [expected[key] for key in ("lr", "loss", "grad_norm")]


@pytest.mark.distributed
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("killed_again", [None, "saving", "training"])
def test_killed_again_it_goes_on_to_the_very_same_end(stopped, reference, killed_again):
    """A run that was killed, and killed again or not; --exit-interval does not stop it where it begins."""
    save, flags = (
        stopped.save.with_name(f"killed again {killed_again}"),
        [*reference.flags, "--exit-interval", str(STOP), "--async-save"],
    )
    shutil.copytree(stopped.save, save)
    moments = {
        "saving": saving(STOP + 1, delay=random.Random(1).uniform(0, 0.05)),
        "training": Moment("", lambda run: resume_check.count_rows(run) > STOP + 1, 0.0),
    }
    if killed_again:
        assert resume_check.Run(save, flags).kill_at(moments[killed_again])
    run = resume_check.Run(save, flags).finish()
    assert run.resumed_from >= STOP
    assert latest_iteration(save) == UPDATES
    assert differences(save, reference.save) == []


@pytest.mark.distributed
@pytest.mark.vllm
@pytest.mark.slow
def test_killed_with_unfinished_completions_it_goes_on_to_the_very_same_end(tmp_path):
    """One rank: its completions of several rollouts have the same tokens as if it had never been killed."""
    job = (
        f"{resume_check.COMMON} {resume_check.JOBS['partial rollouts']} --train-iters {UPDATES} --global-batch-size 64"
    )
    flags = [*job.split(), *resume_check.make_inputs(tmp_path)]
    run_of = resume_check.Run

    def alone(save, flags, nproc=1):
        return run_of(save, flags, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_check, "Run", alone)
        reference = resume_check.make_reference(tmp_path / "undisturbed", flags)
    assert alone(tmp_path / "killed", flags).kill_at(saving(4, delay=random.Random(1).uniform(0, 0.05)))
    run = alone(tmp_path / "killed", flags).finish()
    assert run.resumed_from >= 2
    assert differences(run.save, reference.save) == []
    rows = read_rows(run.save / "metrics.jsonl")
    assert max(row.get("staleness/interrupted", 0) for row in rows) > 0.1


# By default test_earlier_checkpoint.py goes on with other ranks, and checkpoint_worker.py (`resumed`) compares updates.
@pytest.mark.distributed
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "flags"),
    [(2, ["--tensor-model-parallel-size", "2"]), (1, [])],
    ids=["TP2", "1 rank"],
)
def test_resumed_in_another_layout(stopped, reference, nproc, flags):
    save = stopped.save.with_name(f"{nproc} {flags}".translate(str.maketrans(" '[],", "_____")))
    shutil.copytree(stopped.save, save)
    run = resume_check.Run(save, [*reference.flags, *flags], nproc).finish()
    assert run.resumed_from == STOP
    assert re.search(
        rf"was written with the parallel configuration .*'dp': 2.*random states are seeded again, with 1234 \+ {STOP}",
        run.log,
    )
    assert iterations(save) == list(range(UPDATES + 1))
    rows, expected = (read_rows(directory / "metrics.jsonl") for directory in (save, reference.save))
    assert rows[STOP] == read_rows(stopped.save / "metrics.jsonl")[STOP]
    for row, other in zip(rows[STOP + 1 :], expected[STOP + 1 :], strict=True):
        assert (row["lr"], row["consumed/prompts"]) == (other["lr"], other["consumed/prompts"])
        assert row["mismatch/mean_abs"] < 1e-5  # trainer and engine both have the checkpoint's weights
    # What is sampled differs by layout, the prompts do not.
    samples = [read_rows(d / "completions.jsonl") for d in (save, reference.save)]
    prompts = [[row["prompt"] for row in of_run if row["picked"] == "first"] for of_run in samples]
    assert prompts[0] == prompts[1]


def write_run(directory: Path, rows: list[dict], weights: bytes) -> Path:
    (directory / "hf_model").mkdir(parents=True)
    (directory / "hf_model" / "model.safetensors").write_bytes(weights)
    for name in ("metrics.jsonl", "completions.jsonl"):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_what_the_tool_calls_a_difference(tmp_path):
    rows = [{"iteration": 1, "loss": 0.5, "time/step": 1.0}, {"iteration": 2, "loss": 0.25, "time/step": 1.0}]
    a = write_run(tmp_path / "a", rows, b"weights")
    slower = [row | {"time/step": 2.0, "time/save": 1.0, "perf/tokens_per_second": 9.0} for row in rows]
    assert differences(write_run(tmp_path / "slower", slower, b"weights"), a) == []

    changed = [rows[0], rows[1] | {"loss": 0.25 + 2**-54}]
    found = differences(write_run(tmp_path / "changed", changed, b"weight!"), a)
    assert "metrics.jsonl, row 2, iteration 2: loss is 0.25000000000000006 instead of 0.25" in found
    assert "hf_model/model.safetensors differs" in found
    assert (
        "iteration 2: iteration is None instead of 2" in differences(write_run(tmp_path / "short", rows[:1], b""), a)[0]
    )
    (a / "iter_0000002.tmp").mkdir()
    assert differences(a, a) == ["iter_0000002.tmp was not deleted"]


def test_moments_are_drawn_from_the_seed_alone(tmp_path):
    rows = [{"iteration": i, "time/save": 0.1} for i in range(1, 25)]
    save = write_run(tmp_path, rows, b"")
    publish(start(save, 24), {"save_interval": 4})
    reference = Reference([], save, start_seconds=10.0)
    draws = [
        [resume_check.draw_moment(k, random.Random(s), reference).text for s in range(40)]
        for k in ("saving", "training")
    ]
    saves = {int(re.match(r"save (\d+) \+ \d+ ms", text)[1]) for text in draws[0]}
    assert saves == {4, 8, 12, 16, 20, 24}
    assert len(set(draws[1])) > 15
    assert (
        resume_check.draw_moment("starting", random.Random(3), replace(reference, start_seconds=0.0)).text
        == "start + 0.0 s"
    )
