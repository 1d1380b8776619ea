"""The training of a run with --rollout-ranks, repeated from its ledger by the trainer alone."""

import json

import pytest
import ranks
from run_files import metrics_of, without
from sharp_model import make_sharp_model

from megatron_grpo.rollout.ledger import content

PLUGIN = """
from megatron_grpo.rewards.registry import register_reward

@register_reward("even")
def even(sample):
    return sum(token % 2 == 0 for token in sample.token_ids) / 16
"""
FLAGS = """--transformer-impl local --num-generations 4 --global-batch-size 16 --micro-batch-size 8 --lr 1e-3
    --max-prompt-length 32 --max-completion-length 24 --ignore-eos --vllm-max-num-seqs 8 --reward-funcs even
    --max-staleness 2 --rollout-importance-sampling-mode token_truncate --mismatch-limit 0.01 --train-iters 4"""


@pytest.mark.vllm
@pytest.mark.distributed
@pytest.mark.slow
def test_a_replay_ends_with_the_same_metrics_and_weights(tiny_models, tmp_path):
    model = make_sharp_model(tiny_models["qwen3"], tmp_path / "model")
    rows = [{"prompt": f"{number} and {7 * number}", "answer": "1"} for number in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plugin.py").write_text(PLUGIN)
    words = f"--load-hf {model} --train-data-path {tmp_path}/rows.jsonl --external-plugins {tmp_path}/plugin.py {FLAGS}"
    words = [*words.split(), "--vllm-engine-kwargs", json.dumps({"kv_cache_memory_bytes": 2**25})]
    whole, again = tmp_path / "whole", tmp_path / "again"
    ranks.run_torchrun(2, "pretrain_grpo.py", *words, "--save", whole, "--rollout-ranks", 1)
    found = content.read(whole / "ledger")
    assert sorted(found.batches) == [0, 1, 2, 3] and len(found.groups) >= 16
    assert {key.birth for record in found.batches.values() for key in record.groups} == {0, 1}  # K = 2

    ranks.run_torchrun(1, "pretrain_grpo.py", *words, "--save", again, "--replay-rollouts", whole)
    lines = [metrics_of(save) for save in (whole, again)]
    first, second = (without(of) for of in lines)
    assert first == second and len(first) == 4
    weights = [(save / "hf_model" / "model.safetensors").read_bytes() for save in (whole, again)]
    assert weights[0] == weights[1]
