"""Whole runs that evaluate: files of their own, logged completions, --eval-only, and the best checkpoint.

pretrain_grpo.py runs in this process, with an engine whose completions depend on the seed, as vLLM's do.
"""

import json
import re
import shlex
import shutil
import subprocess

import bad_input_runs
import pytest
from bad_input_bench import Bench
from bad_input_runs import TRAIN, files, launch
from ranks import REPO
from run_files import json_lines, metrics_of
from slow import slow_except
from test_sampling_resume import SeededEngine

from megatron_grpo.checkpointing import checkpoint

REWARD = "@register_reward('mine')\ndef mine(sample):\n    return len(sample.token_ids) / 4\n"
HELD_OUT = [[{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 4 + b)] for b in (2, 3)]
FLAGS = """--train-iters 4 --save-interval 2 --eval-interval 2 --val-before-train --eval-num-generations 2
    --eval-completions-to-log 2 --eval-correct-reward 0.75 --eval-max-prompts 5"""


@pytest.fixture(scope="module")
def bench(tiny_models, tmp_path_factory):
    """The inputs of a finished run of four updates with two files of held-out prompts, five and six."""
    bench = Bench(tmp_path_factory.mktemp("evaluation"), tiny_models["qwen3"])
    twos, threes = (
        bench.write(f"{n}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        for n, rows in zip(("twos", "others"), HELD_OUT, strict=True)
    )
    bench.words = [*bench.good, *bench.plugin(REWARD), *FLAGS.split()]
    bench.words += ["--valid-data-path", str(twos), f"threes={threes}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bad_input_runs, "StubEngine", SeededEngine)
        patch.setattr(SeededEngine, "sigterm_in", None)
        assert launch(TRAIN, bench.words) == 0
    return bench


@pytest.fixture
def seeded(monkeypatch):
    monkeypatch.setattr(bad_input_runs, "StubEngine", SeededEngine)
    monkeypatch.setattr(SeededEngine, "sigterm_in", None)


def test_each_file_has_metrics_and_the_overall_ones_are_over_all_prompts(bench):
    rows = [row for row in metrics_of(bench.save) if "eval/greedy_accuracy" in row]
    assert [row["iteration"] for row in rows] == [0, 2, 4]
    for row in rows:
        for name in ("greedy_accuracy", "greedy_reward", "sampled_length", "pass_at_2"):
            assert row[f"eval/{name}"] == pytest.approx(
                (5 * row[f"eval/twos/{name}"] + 5 * row[f"eval/threes/{name}"]) / 10
            )
        assert row["eval/twos/greedy_reward"] == pytest.approx(row["eval/twos/greedy_length"] / 4)


def test_the_completions_of_the_same_prompts_are_logged_each_time(bench):
    logged = json_lines(bench.save / "eval_completions.jsonl")
    assert [row["iteration"] for row in logged] == [0] * 8 + [2] * 8 + [4] * 8
    expected = [(file, f"{a}+{b}=") for file, b in (("twos", 2), ("threes", 3)) for a in (1, 2)]
    for start in range(0, 24, 4):
        assert [(row["file"], row["prompt"]) for row in logged[start : start + 4]] == expected
        assert [row["row"] for row in logged[start : start + 4]] == [0, 1, 0, 1]  # in the file
        assert {row["kind"] for row in logged[start : start + 4]} == {"greedy" if start % 8 == 0 else "sampled"}
    assert all(row["rewards"] == {"mine": row["length"] / 4} for row in logged)
    assert all(
        "file" not in row and row["advantage"] is not None for row in json_lines(bench.save / "completions.jsonl")
    )


def test_the_command_of_the_page_follows_a_prompt(bench):
    page = (REPO / "docs/evaluate.md").read_text()
    (command,) = re.findall(r"^    (grep .*) runs/mine/eval_completions.jsonl$", page, re.M)
    words = [*shlex.split(command), bench.save / "eval_completions.jsonl"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in found.splitlines()]
    assert [(row["iteration"], row["prompt"]) for row in rows[::2]] == [(i, "1+2=") for i in (0, 0, 2, 2, 4, 4)]
    assert {row["prompt"] for row in rows[1::2]} == {"1+3="}


def test_a_resume_repeats_the_rows_after_the_checkpoint(bench, seeded, tmp_path):
    shutil.copytree(bench.save, tmp_path / "save")
    before = json_lines(bench.save / "eval_completions.jsonl")
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("2")
    assert launch(TRAIN, [*bench.words, "--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]) == 0
    assert json_lines(tmp_path / "save" / "eval_completions.jsonl") == before


@pytest.mark.parametrize("origin", ["checkpoint", "hf"])
def test_eval_only_repeats_an_evaluation_of_the_run_and_leaves_its_files(bench, seeded, capfd, origin):
    """The command of the run with --eval-only; the training data are gone."""
    words, before = [*bench.words, "--eval-only"], files(bench.save)
    if origin == "checkpoint":
        words += ["--load", str(bench.save), "--train-data-path", "gone.jsonl"]
    capfd.readouterr()
    assert launch(TRAIN, words) == 0
    out = capfd.readouterr().out
    what = (
        f"checkpoint {bench.save}/iter_0000004" if origin == "checkpoint" else f"Hugging Face directory {bench.model}"
    )
    assert f"evaluation of the {what}\n" in out
    after = files(bench.save)
    assert {path.name for path in after.keys() - before.keys()} <= {"evaluation.json"}
    assert all(after[path] == digest for path, digest in before.items() if path.name != "evaluation.json")
    entry = json.loads((bench.save / "evaluation.json").read_text())["evaluations"][-1]
    assert entry["evaluated"] == what and entry["iteration"] == (4 if origin == "checkpoint" else 0)
    row = metrics_of(bench.save)[-1 if origin == "checkpoint" else 0]
    assert [(r["file"], r["kind"], r["prompts"]) for r in entry["rows"]] == [
        (file, kind, size) for file, size in (("twos", 5), ("threes", 5), ("all", 10)) for kind in ("greedy", "sampled")
    ]
    for found in entry["rows"]:
        prefix = "" if found["file"] == "all" else f"{found['file']}/"
        assert found["accuracy"] == row[f"eval/{prefix}{found['kind']}_accuracy"]
        assert found.get("pass@2") == (row[f"eval/{prefix}pass_at_2"] if found["kind"] == "sampled" else None)
    assert [completion["file"] for completion in entry["completions"]] == ["twos", "twos", "threes", "threes"] * 2
    assert re.search(r"\nall +greedy +10 +0\.", out) and "Traceback" not in out


class RisingAndFalling(SeededEngine):
    """The length of all completions, and so the reward, follows the number of evaluations so far."""

    lengths = (1, 3, 2, 3)

    def submit(self, requests):
        requests = list(requests)
        super().submit(requests)
        for request in requests:
            if not request.sampling.temperature:
                length = self.lengths[self.version - 1]
                self.running[request.id] = [[50] * (length - 1) + [*request.sampling.stop_token_ids[:1]], 0]


KEEP = """--train-iters 4 --save-interval 1 --eval-interval 1 --max-checkpoints-to-keep 1 --no-save-hf
    --keep-best eval/greedy_reward --eval-max-prompts 2"""


@pytest.mark.parametrize("more", slow_except([""], ["", "--async-save"]))
def test_the_best_checkpoint_is_kept_and_named(tiny_models, monkeypatch, tmp_path, capfd, more):
    """Rewards of 1/4, 3/4, 2/4, 3/4: the second is the best, before and after a resume; it can be evaluated."""
    monkeypatch.setattr(bad_input_runs, "StubEngine", RisingAndFalling)
    monkeypatch.setattr(SeededEngine, "sigterm_in", None)
    bench = Bench(tmp_path, tiny_models["qwen3"])
    words = [*bench.good, *bench.plugin(REWARD), *KEEP.split(), "--valid-data-path", str(bench.train), *more.split()]
    saved = lambda: sorted(path.name for path in bench.save.glob("iter_*"))  # noqa: E731
    assert launch(TRAIN, [*words, "--exit-interval", "3"]) == 0
    assert [row["eval/greedy_reward"] for row in metrics_of(bench.save)] == [0.25, 0.75, 0.5]
    best = {"iteration": 2, "metric": "eval/greedy_reward", "value": 0.75}
    assert json.loads((bench.save / "best.json").read_text()) == best
    assert saved() == ["iter_0000002", "iter_0000003"]
    capfd.readouterr()
    assert launch(TRAIN, [*words, "--load", str(bench.save)]) == 0
    assert json.loads((bench.save / "best.json").read_text()) == best
    assert saved() == ["iter_0000002", "iter_0000004"]
    line = f"best checkpoint (eval/greedy_reward 0.7500, {bench.save}/best.json): {bench.save}/iter_0000002\n"
    assert capfd.readouterr().out.count(line) == 1
    assert launch(TRAIN, [*words, "--eval-only", "--load", str(bench.save / "iter_0000002")]) == 0
    (entry,) = json.loads((bench.save / "evaluation.json").read_text())["evaluations"]
    assert entry["iteration"] == 2 and entry["evaluated"] == f"checkpoint {bench.save}/iter_0000002"
    assert entry["rows"][0]["reward"] == 0.75
    words = ["--megatron-to-hf", "--load", str(bench.save / "iter_0000002"), "--save", str(tmp_path / "export")]
    assert launch("tools/checkpoint/convert.py", words) == 0
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "export").iterdir()}


OF_TRAINING = """--save-interval 2 --eval-interval 2 --max-checkpoints-to-keep 1 --keep-best eval/greedy_accuracy
    --async-save --exit-signal-handler --exit-duration-in-mins 60 --on-bad-update restore --num-completions-to-log 4
    --eval-completions-to-log 4 --train-data-path gone.jsonl --lr 1e-6 --train-iters 8"""


@pytest.mark.parametrize("training", ["", OF_TRAINING])
def test_eval_only_needs_no_flags_of_training_and_no_save(bench, seeded, monkeypatch, tmp_path, capfd, training):
    """Flags of the run may stay."""
    monkeypatch.chdir(tmp_path)
    words = f"--transformer-impl local --load-hf {bench.model} --reward-funcs exact_match --max-prompt-length 8"
    words += f" --max-completion-length 4 --valid-data-path {bench.train} --eval-only --vllm-enforce-eager {training}"
    assert launch(TRAIN, words.split()) == 0
    out = capfd.readouterr().out
    assert re.search(r"\ntrain +greedy +8 +[01]\.\d{4} ", out) and "evaluation.json" not in out
    assert list(tmp_path.iterdir()) == []


def test_eval_only_of_nothing(bench, seeded, tmp_path, capfd):
    assert launch(TRAIN, [*bench.words, "--eval-only", "--load", str(tmp_path)]) == 1
    assert f"{tmp_path} (--load) holds no checkpoint; to evaluate --load-hf, leave --load out" in capfd.readouterr().err
    assert launch(TRAIN, [*bench.words, "--eval-only", "--load", str(bench.save / "iter_0000777")]) == 1
    there = ", ".join(sorted(path.name for path in bench.save.glob("iter_*")))
    assert there and f"iter_0000777 (--load) holds no checkpoint; {bench.save} has {there}\n" in capfd.readouterr().err


@pytest.mark.parametrize("what", ["a file", "a damaged table"])
def test_eval_only_finds_before_the_engine_starts_that_it_cannot_write(bench, monkeypatch, tmp_path, capfd, what):
    save = tmp_path / "save"
    if what == "a file":
        save.write_text("")
    else:
        save.mkdir()
        (save / "evaluation.json").write_text("{")
    monkeypatch.setattr(bad_input_runs, "StubEngine", None)
    assert launch(TRAIN, [*bench.words, "--eval-only", "--load", str(bench.save), "--save", str(save)]) == 1
    expected = f"--save {save} cannot be created: File exists" if what == "a file" else f"{save}/evaluation.json"
    assert f"error: {expected}" in capfd.readouterr().err


def test_eval_only_evaluates_one_checkpoint_while_its_run_goes_on(bench, seeded, monkeypatch, tmp_path, capfd):
    """The run of --load saves another checkpoint, and deletes the first one, while the engine starts."""
    save = tmp_path / "save"
    shutil.copytree(bench.save, save)
    newest = save / "latest_checkpointed_iteration.txt"
    newest.write_text("2")
    load = checkpoint.load_weights

    def saved_meanwhile(*args):
        load(*args)
        newest.write_text("4")
        shutil.rmtree(save / "iter_0000002")

    monkeypatch.setattr(checkpoint, "load_weights", saved_meanwhile)
    assert launch(TRAIN, [*bench.words, "--eval-only", "--load", str(save), "--save", str(save)]) == 0
    assert f"evaluation of the checkpoint {save}/iter_0000002\n" in capfd.readouterr().out
    entry = json.loads((save / "evaluation.json").read_text())["evaluations"][-1]
    assert entry["iteration"] == 2 and entry["evaluated"] == f"checkpoint {save}/iter_0000002"


def test_eval_only_of_a_checkpoint_that_its_run_deletes(bench, seeded, monkeypatch, tmp_path, capfd):
    save = tmp_path / "save"
    shutil.copytree(bench.save, save)
    load = checkpoint.load_weights
    monkeypatch.setattr(checkpoint, "load_weights", lambda *args: (shutil.rmtree(save / "iter_0000004"), load(*args)))
    assert launch(TRAIN, [*bench.words, "--eval-only", "--load", str(save), "--save", str(save)]) == 1
    errors = capfd.readouterr().err
    assert f"checkpoint {save}/iter_0000004 does not exist; if its run has deleted it meanwhile" in errors
