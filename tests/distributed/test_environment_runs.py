"""Whole runs with an environment: two ranks of one engine, and a vLLM in each of two ranks; a fault costs one row."""

import json
from pathlib import Path

import pytest
from ranks import run_torchrun

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
