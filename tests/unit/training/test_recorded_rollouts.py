"""Whole runs that only write rollouts (--rollout-only), and runs that only learn from them (--train-only).

pretrain_grpo.py runs in this process, with an engine that gives one token a step.
"""

import json
import shutil
import signal
import subprocess
import sys

import bad_input_runs
import pytest
from bad_input_bench import Bench
from bad_input_runs import REPO, TRAIN, launch
from run_files import metrics_of
from test_partial_rollouts import REWARD, ROWS, Slow, tensors

from megatron_grpo.rollout.ledger import records

FLAGS = "--train-iters 4 --mismatch-limit 100 --max-completion-length 40 --num-iterations 1 --no-save-hf".split()


def bench_of(root, model):
    bench = Bench(root, model)
    bench.words = [*bench.good, *bench.data(*map(json.dumps, ROWS), name="rows.jsonl")]
    bench.words += [*bench.plugin(REWARD.format(log=str(root / "scored"))), *FLAGS]
    return bench


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    """By name: the directory of a synchronous run, of rollouts alone, and of runs that learn from either."""
    kept, saves = signal.getsignal(signal.SIGTERM), {}
    with pytest.MonkeyPatch.context() as patch:

        def run(name, *words):
            bench = bench_of(tmp_path_factory.mktemp(name), tiny_models["qwen3"])
            saves[name] = bench.save
            assert launch(TRAIN, [*bench.words, *map(str, words)]) == 0

        patch.setattr(bad_input_runs, "StubEngine", Slow)
        run("whole", "--ledger", tmp_path_factory.mktemp("ledger") / "whole")
        saves["ledger"] = tmp_path_factory.getbasetemp() / "ledger0" / "whole"
        run("rollouts", "--rollout-only")
        patch.setattr(bad_input_runs, "StubEngine", None)
        run("same", "--train-only", saves["ledger"])
        other = "--loss-type dr_grpo --micro-batch-size 4 --train-iters 12 --lr 1e-4".split()
        run("other", "--train-only", saves["rollouts"], *other)
    signal.signal(signal.SIGTERM, kept)
    return saves


def test_training_on_the_rollouts_of_a_run_is_that_run(runs):
    names = "loss grad_norm lr reward/mean tokens/update tokens/rollout completion/length_mean".split()
    found, expected = (
        [[row[name] for name in names] for row in metrics_of(runs[which])] for which in ("same", "whole")
    )
    assert found == expected and len(found) == 4
    same, whole = (tensors(runs[which] / "iter_0000004") for which in ("same", "whole"))
    assert same == whole


def test_rollouts_alone_are_all_of_the_first_weights(runs):
    assert [row["iteration"] for row in metrics_of(runs["rollouts"])] == [1, 2, 3, 4]
    assert all("loss" not in row and row["tokens/rollout"] > 0 for row in metrics_of(runs["rollouts"]))
    assert not list(runs["rollouts"].glob("iter_*"))
    assert metrics_of(runs["rollouts"])[0]["reward/mean"] == metrics_of(runs["whole"])[0]["reward/mean"]


def test_another_algorithm_learns_from_them_in_batches_of_its_own(runs):
    """Half the groups a batch: eight batches of four recorded ones, then four of the second pass."""
    learnt, made = metrics_of(runs["other"]), metrics_of(runs["rollouts"])
    assert [row["iteration"] for row in learnt] == list(range(1, 13)) and all(row["grad_norm"] >= 0 for row in learnt)
    tokens = [row["tokens/rollout"] for row in learnt]
    assert [tokens[n] + tokens[n + 1] for n in range(0, 8, 2)] == [row["tokens/rollout"] for row in made]
    assert tokens[8:] == tokens[:4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--train-only {rollouts} --temperature 0.5", "--temperature was 1.0 and is 0.5: give them as before"),
        (
            "--train-only {rollouts} --max-completion-length 39",
            "has sequences of up to 48 tokens, more than --max-prompt-",
        ),
        ("--train-only {rollouts} --num-generations 8", "--num-generations was 4 and is 8"),
        ("--train-only {rollouts} --global-batch-size 64", "--train-only has 8 groups, fewer than the 16 of a batch"),
        ("--replay-rollouts {ledger} --lr 1e-2", "--lr was 0.001 and is 0.01: give them as before"),
        ("--replay-rollouts {same}", "no batches of a ledger there; give the directory of --ledger"),
        ("--replay-rollouts {ledger} --train-only {ledger}", "--replay-rollouts and --train-only cannot both be given"),
    ],
)
def test_what_does_not_fit_is_refused(runs, tiny_models, tmp_path, capsys, words, message):
    bench = bench_of(tmp_path, tiny_models["qwen3"])
    given = [str(runs[word[1:-1]]) if word.startswith("{") else word for word in words.split()]
    assert launch(TRAIN, [*bench.words, *given]) == 1
    assert message in "".join(capsys.readouterr())


def written_earlier(ledger, directory, **other):
    """Copy a ledger as a version wrote it that lacked flags of today and had others."""
    newer = {"answer_extraction", "unfinished_thinking", "turn_gamma", "gigpo_weight", "cuda_graphs", "clip_grad"}
    for path in shutil.copytree(ledger, directory).glob("batches-*.bin"):
        found = [record.head for record in records.scan(path)]
        path.unlink()
        run = {name: value for name, value in found[0]["run"].items() if name not in newer} | other
        file = records.RecordFile(path)
        for head in [found[0] | {"run": run}, *found[1:]]:
            file.append(head)
        file.close()
    return directory


def test_a_ledger_of_an_earlier_version_is_replayed(runs, tiny_models, tmp_path):
    """Flags that are newer have their defaults, and one that is gone was not set."""
    ledger = written_earlier(runs["ledger"], tmp_path / "earlier", fp32_residual_connection=False, delta=None)
    bench = bench_of(tmp_path, tiny_models["qwen3"])
    assert launch(TRAIN, [*bench.words, "--replay-rollouts", str(ledger)]) == 0
    replayed, whole = (tensors(save / "iter_0000004") for save in (bench.save, runs["whole"]))
    assert replayed == whole


@pytest.mark.parametrize(
    ("other", "words", "message"),
    [
        ({}, "--clip-grad 0.5", "--clip-grad was not recorded and is 0.5"),
        ({"delta": 3.0}, "", "--delta was 3.0 and is no flag any more"),
    ],
)
def test_a_ledger_of_an_earlier_version_with_other_flags_is_refused(
    runs, tiny_models, tmp_path, capsys, other, words, message
):
    ledger = written_earlier(runs["ledger"], tmp_path / "earlier", **other)
    bench = bench_of(tmp_path, tiny_models["qwen3"])
    assert launch(TRAIN, [*bench.words, "--replay-rollouts", str(ledger), *words.split()]) == 1
    assert message in "".join(capsys.readouterr())


def test_the_reader_shows_what_a_ledger_holds(runs):
    def show(*words):
        command = [sys.executable, str(REPO / "tools" / "ledger.py"), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True)

    whole = show(runs["rollouts"], "--check")
    assert whole.returncode == 0 and "4 batches, 8 finished groups" in whole.stdout
    assert "batch 3: 2 groups; 2 started 0 batches before" in whole.stdout
    batch, group = show(runs["rollouts"], "--batch", "1"), show(runs["rollouts"], "--group", "1", "0")
    assert "0: group 1 0, row" in batch.stdout and "versions [0]" in group.stdout
    assert show(runs["rollouts"], "--batch", "9").returncode == 1
    file = next((runs["rollouts"] / "ledger").glob("groups-*.bin"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert show(runs["rollouts"], "--check").returncode == 1
