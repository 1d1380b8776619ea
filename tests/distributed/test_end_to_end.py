"""Whole runs on two ranks, as a user starts them: tools, torchrun, vLLM, files; and a run that loses a rank."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
from ranks import REPO, alive, run_torchrun
from safetensors.torch import load_file
from sharp_model import make_sharp_model

from megatron_grpo.checkpointing import checkpoint_directory
from megatron_grpo.observability.metric_guide import METRICS, check_names
from tools.make_tiny_model import build_parser, make

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]

# GSM8K's form, written for this test.
ROWS = [
    {
        "question": f"{name} has {a} {thing} and gets {b} more from each of {c} friends. How many {thing} is that?",
        "answer": f"The friends give {b}*{c}=<<{b}*{c}={b * c}>>{b * c}.\n"
        f"Together that is {a}+{b * c}=<<{a}+{b * c}={a + b * c}>>{a + b * c:,} {thing}.\n#### {a + b * c:,}",
    }
    for name, thing in (("Ida", "pens"), ("Omar", "stamps"), ("Li", "shells"), ("Ana", "coins"))
    for a, b, c in ((1, 2, 3), (3, 1, 4), (2, 1, 3), (1, 4, 2), (5, 2, 1), (990, 7, 2))  # 7, 7, 5, 9, 7, 1,004
]
COMMON = """--transformer-impl local --vllm-max-num-seqs 32 --num-generations 4 --lr 2e-4
    --max-prompt-length 160 --max-completion-length 16 --train-iters""".split()
# What every update reports, what the first one of a rollout does as well, and what an evaluation does.
OF_A_ROLLOUT = {"tokens/rollout", "time/rollout", "time/scoring", "time/logprobs"}
OF_AN_EVALUATION = {name for name in METRICS if name.startswith("eval/") and "<" not in name}
OF_AN_EVALUATION |= {"time/eval", "eval/pass_at_1", "eval/pass_at_2"}
OF_AN_UPDATE = (
    {name for name in METRICS if "<" not in name}
    - OF_A_ROLLOUT
    - OF_AN_EVALUATION
    - {
        name
        for name in METRICS
        if name.startswith(
            (
                "memory/",
                "sampling/",
                "lora/",
                "staleness/",
                "stream/",
                "drafts/",
                "environment/",
                "turns/",
                "sft/",
                "dpo/",
            )
        )
    }
    - {name for name in METRICS if name.startswith("perf/") and name != "perf/tokens_per_second"}
    - {"params_norm", "time/sync", "time/save", "time/offload", "time/ledger"}
    - {"moe/balance_loss", "mtp/grad_norm", "reward/kl_penalty", "teacher/kl", "mismatch/newest_mean_abs"}
    - {"tokens/shared", "teacher/divergence"}
)


@pytest.fixture(scope="module")
def model(tiny_models, tmp_path_factory):
    """A Hugging Face directory whose completions now and then hold a number."""
    return make_sharp_model(tiny_models["qwen3"], tmp_path_factory.mktemp("end_to_end") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prompt files that tools/data/gsm8k.py made: train.parquet and test.jsonl, of chat messages."""
    directory = tmp_path_factory.mktemp("data")
    for name, rows, output in (("train", ROWS[:18], "train.parquet"), ("test", ROWS[18:], "test.jsonl")):
        raw = directory / f"gsm8k_{name}.jsonl"
        raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tool("tools/data/gsm8k.py", "--input", raw, "--output", directory / output)
    lines = (directory / "test.jsonl").read_text().splitlines(keepends=True)
    (directory / "one.jsonl").write_text(lines[0])  # fewer prompts than ranks
    return directory


def tool(script, *arguments) -> str:
    """Run a tool of the repository; returns what it printed."""
    if not ranks.thorough:
        return run_torchrun(1, script, *arguments).stdout
    command = [sys.executable, script, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_lines(path: Path) -> list[dict]:
    """The rows of a JSON-lines file; a last line that is being written is left out."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture(scope="module")
def run(model, data, tmp_path_factory):
    """The --save directory of a finished run of two rollouts with two updates each, and what it printed."""
    save = tmp_path_factory.mktemp("run") / "save"
    words = f"""--load-hf {model} --train-data-path {data}/train.parquet --valid-data-path {data}/test.jsonl
        one={data}/one.jsonl --keep-best eval/one/greedy_reward --save-interval 2 --max-checkpoints-to-keep 1
        --val-before-train --eval-interval 2 --eval-num-generations 2 --reward-funcs gsm8k format --reward-weights 1 0.2
        --steps-per-generation 2 --global-batch-size 32 --max-tokens-per-microbatch 400 --beta 0.04
        --rollout-importance-sampling-mode icepop --system-prompt Think. --save {save}
        --num-completions-to-log 6 --tensorboard-dir {save}/tensorboard""".split()
    done = run_torchrun(2, "pretrain_grpo.py", *COMMON, 4, *words)
    return save, done.stdout


def test_metrics_are_complete_documented_and_finite(run):
    rows = read_lines(run[0] / "metrics.jsonl")
    assert [row.pop("iteration") for row in rows] == [0, 1, 2, 3, 4]
    for row in rows:
        check_names(row)
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in row.values()), row
    for number, row in enumerate(rows):
        assert (row.keys() >= OF_AN_UPDATE | {"reward/gsm8k/mean", "reward/format/mean"}) == (number > 0), number
        assert (row.keys() >= OF_A_ROLLOUT) == (number in (1, 3)), number
        assert (row.keys() >= OF_AN_EVALUATION) == (number in (0, 2, 4)), number
    assert [row["consumed/prompts"] for row in rows[1:]] == [16, 16, 32, 32]
    assert rows[4]["tokens/total"] == sum(row["tokens/update"] for row in rows[1:])


def test_metrics_say_what_happened(run):
    rows = read_lines(run[0] / "metrics.jsonl")[1:]
    for row in rows:
        # Compared are the log-probabilities before the rollout's updates, so both updates agree with the engine.
        assert row["mismatch/mean_abs"] < 1e-5 and row["mismatch/kl"] < 1e-8 and row["mismatch/clipped"] == 0
        for name in ("perplexity_ratio", "effective_sample_size"):
            assert row[f"mismatch/{name}"] == pytest.approx(1.0, abs=1e-5)
        assert row["reward/mean"] == pytest.approx(row["reward/gsm8k/mean"] + 0.2 * row["reward/format/mean"])
        assert row["reward/failures"] == 0
    for first in (rows[0], rows[2]):
        assert first["ratio/max"] == pytest.approx(1.0, abs=1e-4) and first["clip/low"] == first["clip/high"] == 0
    assert rows[3]["ratio/max"] > 1.001  # the second update of a rollout is off its policy
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6) and rows[3]["kl"] > 1e-5
    assert any(row["reward/gsm8k/mean"] > 0 for row in rows) and any(row["grad_norm"] > 1e-3 for row in rows)


def test_samples_of_completions(run, data):
    samples = read_lines(run[0] / "completions.jsonl")
    assert [sample["iteration"] for sample in samples] == [1] * 6 + [3] * 6
    questions = [row["question"] for row in read_lines(data / "gsm8k_train.jsonl")]
    for number, sample in enumerate(samples):
        assert sample["prompt"] == f"system: Think.\nuser: {questions[sample['row']]}\nassistant: "
        assert sample["picked"] == ["first", "first", "first", "best", "worst", "best"][number % 6]
        if sample["picked"] == "first":
            assert sample["row"] == samples[number // 6 * 6]["row"]  # a prompt has four
        assert sample["rewards"].keys() == {"gsm8k", "format"}
        assert sample["finish_reason"] == ("stop" if sample["length"] < 16 else sample["finish_reason"])
        assert math.isfinite(sample["advantage"])
        assert len(sample["tokens"]) == len(sample["log_probs"]) == sample["length"]
        assert all(log_prob <= 0 for log_prob in sample["log_probs"])
    for best, worst, second in (samples[3:6], samples[9:12]):
        assert best["advantage"] >= second["advantage"] >= worst["advantage"]


def test_held_out_files(run, data):
    """The prompt of the second file is the first one of the first file; seven prompts on two ranks."""
    rows = [row for row in read_lines(run[0] / "metrics.jsonl") if "eval/greedy_reward" in row]
    for row in rows:
        for name in ("greedy_reward", "greedy_length"):
            both = 6 * row[f"eval/test/{name}"] + row[f"eval/one/{name}"]
            assert row[f"eval/{name}"] == pytest.approx(both / 7)
    logged = read_lines(run[0] / "eval_completions.jsonl")
    assert [row["iteration"] for row in logged] == [0] * 14 + [2] * 14 + [4] * 14
    for first, one in ((rows[0], rows[6]) for rows in (logged[start : start + 7] for start in range(0, 42, 7))):
        assert (first["file"], one["file"]) == ("test", "one") and first["prompt"] == one["prompt"]
        if first["kind"] == "greedy":
            assert first["completion"] == one["completion"] and first["rewards"] == one["rewards"]
    values = {row["iteration"]: row["eval/one/greedy_reward"] for row in rows if row["iteration"]}
    best = json.loads((run[0] / "best.json").read_text())
    assert best == {"iteration": 4 if values[4] > values[2] else 2, "metric": "eval/one/greedy_reward"} | {
        "value": max(values.values())
    }
    assert (run[0] / f"iter_{best['iteration']:07d}").is_dir()


def test_the_run_says_what_it_is(run, model):
    save, _ = run
    stored, environment = (json.loads((save / name).read_text()) for name in ("args.json", "environment.json"))
    assert stored["load_hf"] == model and stored["beta"] == 0.04
    assert environment["layout"].startswith("2 ranks = TP 1 x PP 1 x DP 2")
    assert environment["start_iteration"] == 0 and "load_hf" in environment["given"]


def test_what_is_printed(run):
    output = run[1]
    assert "2 ranks = TP 1 x PP 1 x DP 2" in output
    assert output.count("| reward ") == 4 and output.count("\nevaluation ") == 9
    assert "done: 4 updates" in output and "Traceback" not in output


def test_the_checkpoint(run, model):
    save, _ = run
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    iteration, directory = checkpoint_directory.find(save)
    checkpoint_directory.verify(directory)
    assert iteration == 4
    stored = json.loads((directory / "args.json").read_text())
    wanted = {"beta": 0.04, "steps_per_generation": 2, "global_batch_size": 32, "generation_batch_size": 64}
    wanted |= {"num_layers": 4, "vocab_size": 258, "reward_weights": [1.0, 0.2], "load_hf": model}
    assert {name: stored[name] for name in wanted} == wanted
    assert list((save / "tensorboard").iterdir())


def test_the_export_answers_the_same_in_transformers_and_vllm(run, model, data):
    export = run[0] / "hf_model"
    before, after = load_file(f"{model}/model.safetensors"), load_file(export / "model.safetensors")
    assert {name: w.shape for name, w in after.items()} == {name: w.shape for name, w in before.items()}
    assert not any(before[name].equal(after[name]) for name in before)
    output = tool("tools/check_export.py", "--hf", export, "--data", data / "test.jsonl", "--max-completion-length", 16)
    assert "equal greedy completions in transformers and vLLM: 6 of 6" in output


PLUGIN = """
from megatron_grpo.rewards.registry import Sample, register_reward

@register_reward("few_digits")
async def few_digits(sample: Sample) -> float:
    return -float(sum(c.isdigit() for c in sample.completion))
"""


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found += map(int, file.read_text().split())
    return found


def newest(save: Path) -> int:
    """The iteration of the newest checkpoint, 0 without one."""
    return checkpoint_directory.latest_iteration(save) or 0


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def start(words: list[str], output: Path) -> tuple[Any, list[int]]:
    """Start pretrain_grpo.py on two ranks, with --thorough by torchrun itself; returns (process, the ranks' ids)."""
    if not ranks.thorough:
        run = ranks.WarmRun(2, [str(REPO / "pretrain_grpo.py"), *words], ranks._environment(), str(output))
        return run, run.pids
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "pretrain_grpo.py"]
    with open(output, "w") as file:
        process = subprocess.Popen(
            [*command, *words],
            cwd=REPO,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def members() -> list[int]:  # torchrun's children are the parents of the ranks
        return [rank for parent in children(process.pid) for rank in children(parent)]

    wait_until(lambda: process.poll() is not None or len(members()) == 2, 600, "two ranks")
    return process, sorted(members(), key=lambda pid: b"RANK=1" in environment_of(pid))


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.slow  # test_restart.py has a rank that is killed, with the Megatron engine
def test_a_rank_that_dies_ends_the_run_and_what_was_saved_goes_on(model, data, tmp_path):
    """Two pipeline stages, an engine over both ranks, and a reward of one's own; rank 1 is killed by SIGKILL."""
    (tmp_path / "own.py").write_text(PLUGIN)
    (tmp_path / "output").touch()
    save = tmp_path / "save"
    words = f"""--load-hf {model} --train-data-path {data}/train.parquet --external-plugins {tmp_path}/own.py
        --reward-funcs few_digits --micro-batch-size 2 --global-batch-size 8 --beta 0 --save {save} --load {save}
        --save-interval 1 --max-checkpoints-to-keep 2 --pipeline-model-parallel-size 2
        --vllm-tensor-parallel-size 2""".split()
    process, members = start([*COMMON, "100000", *words], tmp_path / "output")
    try:
        latest = save / "latest_checkpointed_iteration.txt"
        wait_until(
            lambda: process.poll() is not None or (latest.exists() and int(latest.read_text()) >= 2), 600, "a save"
        )
        assert process.poll() is None, (tmp_path / "output").read_text()
        started = members + [child for rank in members for child in children(rank)]
        os.kill(members[1], signal.SIGKILL)
        assert process.wait(timeout=300) != 0
        wait_until(lambda: not any(map(alive, started)), 120, "the end of all processes")  # those that score included
    finally:
        if process.poll() is None:
            for pid in members:
                os.killpg(pid, signal.SIGKILL)
            process.wait()

    iteration, directory = checkpoint_directory.find(save)
    checkpoint_directory.verify(directory)
    assert iteration >= 2
    done = run_torchrun(2, "pretrain_grpo.py", *COMMON, iteration + 2, *words)
    assert f"resumed from {save} at iteration {iteration}" in done.stdout
    rows = read_lines(save / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, iteration + 3))
    for row in rows:
        assert all(value is not None for value in row.values()), row
        assert row["mismatch/mean_abs"] < 1e-5 and row["reward/few_digits/mean"] == row["reward/mean"] <= 0
        assert "kl" in row and row["kl"] == 0  # without --beta there is no reference
    assert len(load_file(save / "hf_model" / "model.safetensors")) == len(load_file(f"{model}/model.safetensors"))


@pytest.mark.slow
def test_a_mixture_of_experts_over_two_ranks(data, tmp_path):
    """Half of the experts on each rank, and an engine on each with all of them, which follows the updates. The KL is
    in the reward, so every rollout has a pass for the old policy, though it makes one update.
    """
    (tmp_path / "own.py").write_text(PLUGIN)
    words = f"--save {tmp_path}/random --shape qwen3_moe --tokenizer bytes --steps 0 --quiet --hidden-size 64"
    make(build_parser().parse_args([*words.split(), "--max-position-embeddings", "512"]))
    model = make_sharp_model(tmp_path / "random", tmp_path / "model")
    save = tmp_path / "save"
    words = f"""--load-hf {model} --train-data-path {data}/train.parquet --external-plugins {tmp_path}/own.py
        --reward-funcs few_digits --expert-model-parallel-size 2 --global-batch-size 32 --max-tokens-per-microbatch 400
        --advantage-estimator rloo --kl-in-reward --save {save}"""
    run_torchrun(2, "pretrain_grpo.py", *COMMON, 2, *words.split())
    rows = read_lines(save / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["mismatch/mean_abs"] < 1e-5 and row["grad_norm"] > 1e-3
    # beta times what k1 adds up to in a completion: nothing before the first update
    assert abs(rows[0]["reward/kl_penalty"]) < 1e-6 < abs(rows[1]["reward/kl_penalty"])

    before, after = load_file(f"{model}/model.safetensors"), load_file(save / "hf_model" / "model.safetensors")
    assert before.keys() == after.keys() and not any(before[name].equal(after[name]) for name in before)
    if ranks.thorough:  # the dense model's export is compared in every run
        words = ("--hf", save / "hf_model", "--data", data / "test.jsonl", "--max-completion-length", 16)
        assert "equal greedy completions in transformers and vLLM: 6 of 6" in tool("tools/check_export.py", *words)
