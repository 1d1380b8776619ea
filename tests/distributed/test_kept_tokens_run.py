"""Runs of pretrain_grpo.py with a truncated rollout: the log-probabilities of vLLM are those of the trainer."""

import json
from pathlib import Path

import pytest
from ranks import run_torchrun
from run_files import metrics_of
from sharp_model import make_sharp_model

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]

TRUNCATED = "--temperature 0.6 --top-k 8 --top-p 0.9"
COMMON = """--transformer-impl local --vllm-max-num-seqs 32 --num-generations 4 --lr 1e-3 --max-prompt-length 16
    --max-completion-length 16 --global-batch-size 16 --steps-per-generation 2 --train-iters 4 --beta 0.04
    --reward-funcs digits --micro-batch-size 4"""
PLUGIN = """
from megatron_grpo.rewards.registry import register_reward

@register_reward("digits")
def digits(sample):
    return sum(letter.isdigit() for letter in sample.completion) / max(1, len(sample.completion))
"""
RUNS = {
    "replayed": (1, TRUNCATED),
    "replayed, min-p, two ranks of a replica": (
        2,
        f"{TRUNCATED} --min-p 0.02 --vllm-tensor-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "replayed at temperature 1": (1, "--top-k 8 --top-p 0.9"),
    "not replayed": (1, f"{TRUNCATED} --no-top-k-replay"),
    "not known": (1, "--temperature 0.6 --top-p 0.9"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_engine_and_trainer_agree_over_the_kept_tokens(name, tiny_models, tmp_path):
    world, flags = RUNS[name]
    model = make_sharp_model(tiny_models["qwen3"], tmp_path / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plugin.py").write_text(PLUGIN)
    words = f"--load-hf {model} --train-data-path {tmp_path}/train.jsonl --save {tmp_path}/save --no-save-hf"
    words += f" --external-plugins {tmp_path}/plugin.py {COMMON} {flags}"
    printed = run_torchrun(world, "pretrain_grpo.py", *words.split()).stdout
    metrics = metrics_of(Path(tmp_path, "save"))
    assert len(metrics) == 4 and max(abs(row["ratio/max"] - 1) for row in metrics) > 1e-3  # the policy moved
    if not name.startswith("replayed"):
        assert "mismatch is not measured: the engine's log-probabilities would include --top-p 0.9" in printed
        assert not any(key.startswith("mismatch/") for row in metrics for key in row)
        return
    assert "mismatch is not measured" not in printed
    print([(row["mismatch/mean_abs"], row["mismatch/max_abs"], row["entropy"]) for row in metrics])
    assert all(row["mismatch/mean_abs"] < 1e-5 for row in metrics)
    assert all(0 < row["entropy"] < 2.08 for row in metrics)  # log 8
