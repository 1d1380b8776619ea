"""Whole runs with an environment: two ranks of one engine, and a vLLM in each of two ranks; a fault costs one row.

examples/grpo/quickstart_tools.sh, killed and started again.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ranks import REPO, run_torchrun

from tools.resume_check import differences

pytestmark = [pytest.mark.distributed, pytest.mark.vllm]

PLUGIN = Path(__file__).resolve().parents[1] / "data/echo_environment.py"
FLAGS = """--tokenizer-type HuggingFaceTokenizer --transformer-impl local --max-prompt-length 40 --num-generations 4
    --max-completion-length 30 --max-environment-tokens 50 --environment echo --max-turns 4
    --reward-funcs environment --micro-batch-size 4 --global-batch-size 32 --lr 1e-3 --train-iters 2
    --no-shuffle --num-completions-to-log 64""".split()


@pytest.mark.parametrize("engine", ["megatron", "vllm"])
def test_a_run(engine, tiny_models, tmp_path):
    """Logged completions have their turns; log-probabilities agree over whole trajectories."""
    data, model = tmp_path / "train.jsonl", tiny_models["qwen3"]
    rows = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    layout = ["--tensor-model-parallel-size", 2, "--sequence-parallel"] if engine == "megatron" else []
    layout += ["--vllm-max-num-seqs", 16] if engine == "vllm" else []
    # Every tenth byte ends a turn, so that random weights have several.
    ends = ["--stop-token-ids", *range(0, 250, 10)]
    run = run_torchrun(
        2, "pretrain_grpo.py", "--load-hf", model, "--tokenizer-model", model, "--train-data-path", data, *FLAGS,
        "--external-plugins", PLUGIN, "--rollout-engine", engine, *layout, *ends, "--save", tmp_path / "run",
    )  # fmt: skip
    assert "the environment failed in 4 episodes: raised OSError: no connection" in run.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    first = metrics[0]
    assert len(metrics) == 2 and first["environment/failed"] == 4 / 32
    assert first["environment/turns"] > 1.5 and first["environment/tokens"] > 10
    assert all(row["mismatch/mean_abs"] < 1e-5 for row in metrics)
    assert all(abs(row["reward/mean"]) > 0 for row in metrics)


@pytest.mark.slow
def test_the_quickstart_with_a_tool(tmp_path):
    """Held-out accuracy goes from below 0.2 to above 0.9 by ten updates with the calculator, and stays at 0 without it;
    a run that was killed after its first checkpoint has the same rows, completions and weights as an undisturbed one.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = ["bash", "examples/grpo/quickstart_tools.sh"]

    def start(work, log):
        own = environment | {"WORK": str(work), "UPDATES": "10"}
        with open(log, "w") as file:
            return subprocess.Popen(command, cwd=REPO, env=own, stdout=file, stderr=file, start_new_session=True)

    def rows(work, run):
        file = work / run / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    killed, log = tmp_path / "killed", tmp_path / "log"
    process = start(killed, log)
    while len(rows(killed, "with_tool")) < 8:  # those of update 0, the evaluation, to 7
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    undisturbed = tmp_path / "undisturbed"
    for name in ("data", "model_hf"):
        shutil.copytree(killed / name, undisturbed / name)
    for work in (undisturbed, killed):
        assert start(work, log).wait() == 0, log.read_text()[-3000:]
    assert "at iteration 5" in log.read_text()  # it has resumed
    assert differences(killed / "with_tool", undisturbed / "with_tool") == []

    accuracy = {run: [row["eval/greedy_accuracy"] for row in rows(killed, run) if "eval/greedy_accuracy" in row]
                for run in ("with_tool", "without_tool")}  # fmt: skip
    assert accuracy["with_tool"][0] < 0.2 and accuracy["with_tool"][-1] > 0.9, accuracy
    assert max(accuracy["without_tool"]) < 0.05, accuracy
    turns = [row["environment/turns"] for row in rows(killed, "with_tool") if "environment/turns" in row]
    assert turns[0] < 1.4 and turns[-1] > 1.8
