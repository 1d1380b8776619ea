"""Ten updates of the newest families, and a resume in between in another parallel configuration.

The engine is vLLM or the training model. Each sync to a colocated vLLM compares the weights.
"""

import json
from pathlib import Path

import pytest
import toy_checkpoints as toys
from ranks import run_torchrun
from safetensors.torch import load_file, save_file

from tools.make_tiny_model import build_parser, make, make_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.distributed, pytest.mark.slow]

PLUGIN = """
from megatron_grpo.rewards.registry import Sample, register_reward

@register_reward("ones")
def ones(sample: Sample) -> float:
    return float(sample.completion.count("1"))
"""
FLAGS = """--transformer-impl local --num-generations 4 --global-batch-size 16 --micro-batch-size 8
    --max-prompt-length 8 --max-completion-length 8 --lr 1e-3 --reward-funcs ones --beta 0 --seed 3"""
VLLM = "--vllm-max-num-seqs 32 --check-weight-sync"
BFLOAT16 = f"{VLLM} --vllm-dtype bfloat16"  # all that vLLM has of delta nets on a CPU
PLACED = "--vllm-max-num-seqs 32 --vllm-dtype bfloat16 --rollout-ranks 1"  # a rank more
MEGATRON = "--rollout-engine megatron --inference-max-requests 20"
EXPERTS = "--expert-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
STAGES = "--pipeline-model-parallel-size 2"
# tools/make_tiny_model.py makes none of these. vLLM computes these sizes on a CPU.
OTHERS = {"qwen3_5_moe_text": toys.DELTA, "gemma4_moe": {"head_dim": 32, "global_head_dim": 64}, toys.MAMBA_MOE: {}}
# Model, flags of the engine, layout of the first five updates, layout of the others.
CASES = [
    ("glm4_moe_lite", VLLM, EXPERTS, f"{TENSOR} {EXPERTS} --expert-tensor-parallel-size 1"),
    ("minimax_m2", VLLM, f"{TENSOR} --expert-tensor-parallel-size 2", EXPERTS),
    ("deepseek_v3", VLLM, STAGES, EXPERTS),  # as Kimi-K2.5's language model
    ("nemotron_h", VLLM, STAGES, TENSOR),
    ("qwen3_5_text", BFLOAT16, "", TENSOR),
    ("gemma4_text", VLLM, STAGES, TENSOR),
    ("qwen3_next", BFLOAT16, EXPERTS, f"{TENSOR} --expert-tensor-parallel-size 2"),
    ("qwen3_5_moe_text", BFLOAT16, EXPERTS, STAGES),
    ("gemma4_moe", VLLM, EXPERTS, STAGES),
    ("qwen3_5_text", PLACED, "", TENSOR),
    ("qwen3_next", PLACED, EXPERTS, STAGES),
    ("glm4_moe_lite", MEGATRON, EXPERTS, STAGES),
    ("minimax_m2", MEGATRON, EXPERTS, f"{TENSOR} --expert-tensor-parallel-size 2"),
    ("nemotron_h", MEGATRON, TENSOR, STAGES),
    ("qwen3_5_text", MEGATRON, STAGES, TENSOR),
    ("gemma4_text", MEGATRON, TENSOR, STAGES),
    ("qwen3_next", MEGATRON, f"{TENSOR} --expert-tensor-parallel-size 2", EXPERTS),
    ("qwen3_5_moe_text", MEGATRON, STAGES, EXPERTS),
    ("gemma4_moe", MEGATRON, STAGES, EXPERTS),
    (toys.MAMBA_MOE, MEGATRON, EXPERTS, STAGES),  # vLLM does not compute its experts on a CPU
]
NAMES = {VLLM: "vLLM", BFLOAT16: "vLLM", PLACED: "vLLM on a rank of its own", MEGATRON: "the training model"}
IDS = [f"{family}, {NAMES[engine]}" for family, engine, *_ in CASES]


def wrap_in_kimi(directory: Path) -> None:
    """Give a DeepSeek-V3 checkpoint the names and the config.json of Kimi-K2.5, with a part of a vision tower."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.pos_emb.weight"] = tensors["language_model.lm_head.weight"][:2].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    text = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"}
    names = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    config = names | {"text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))


def make_inputs(directory: Path, family: str) -> str:
    """Write a tiny model, rows and a reward; return the flags that name them."""
    if family in OTHERS:
        tokenizer = make_tokenizer("characters")
        ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        ids |= {"pad_token_id": tokenizer.pad_token_id, "vocab_size_per_layer_input": len(tokenizer)}
        toys.make(directory / "model", family, tied=False, **{**ids, **OTHERS[family]})
        tokenizer.save_pretrained(directory / "model")
    else:
        words = f"--save {directory}/model --shape {family} --steps 0 --quiet --hidden-size 64 --num-layers 4"
        make(build_parser().parse_args(words.split()))
    (directory / "own.py").write_text(PLUGIN)
    rows = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"--train-data-path {directory}/train.jsonl --external-plugins {directory}/own.py"
    return f"--load-hf {directory}/model {data}"


@pytest.mark.parametrize(("family", "engine", "first", "second"), CASES, ids=IDS)
def test_ten_updates_resumed_in_another_layout(family, engine, first, second, tmp_path):
    model, save = tmp_path / "model", tmp_path / "save"
    inputs = make_inputs(tmp_path, family)
    before, ranks = toys.tensors_of(model), 2 + ("--rollout-ranks" in engine)
    if family == "deepseek_v3":
        wrap_in_kimi(model)
    words = f"{FLAGS} {engine} {inputs} --save {save} --load {save} --train-iters 10 --save-interval 5".split()
    run_torchrun(ranks, "pretrain_grpo.py", *words, *first.split(), "--exit-interval", 5)
    done = run_torchrun(ranks, "pretrain_grpo.py", *words, *second.split())
    assert f"resumed from {save} at iteration 5" in done.stdout

    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 11))
    # bfloat16 in the engine alone, and experts that it may choose otherwise.
    bound = 1e-5 if "bfloat16" not in engine else 5e-2 if family == "qwen3_5_moe_text" else 2e-2
    mismatch = [row["mismatch/mean_abs"] for row in rows]
    assert all(gap < bound for gap in mismatch) and all(row["grad_norm"] > 0 for row in rows), (mismatch, rows)
    assert sum(row["reward/mean"] for row in rows[5:]) > sum(row["reward/mean"] for row in rows[:5])
    after = toys.tensors_of(save / "hf_model")
    assert after.keys() == before.keys()
    changed = {name for name in before if not after[name].equal(before[name])}
    still = ("correction_bias", "layer_scalar")
    assert changed >= {name for name in before if "experts." not in name and not name.endswith(still)}


@pytest.mark.parametrize(
    ("family", "engine", "bound"),
    [
        ("qwen3_5_text", "--rollout-engine megatron --inference-max-requests 20", 1e-5),
        ("qwen3_next", "--rollout-engine megatron --inference-max-requests 20", 1e-5),
        ("nemotron_h", "--vllm-max-num-seqs 20", 1e-5),
        ("qwen3_5_text", "--vllm-dtype bfloat16 --vllm-max-num-seqs 20", 2e-2),
    ],
)
def test_partial_rollouts_of_delta_nets(tmp_path, family, engine, bound):
    """Completions go on in the next rollout: their states are computed again from all tokens so far.

    With a learning rate of nearly 0 tokens of older weights have the log-probabilities of the newest ones.
    """
    words = f"""{make_inputs(tmp_path, family)} {engine} --transformer-impl local --num-generations 4 --beta 0
        --global-batch-size 16 --micro-batch-size 8 --max-prompt-length 8 --max-completion-length 24 --lr 1e-12
        --reward-funcs ones --partial-rollouts --max-staleness 1 --rollout-importance-sampling-mode token_truncate
        --train-iters 4 --no-save-hf --save {tmp_path}/save --seed 3"""
    run_torchrun(1, "pretrain_grpo.py", *words.split())
    rows = [json.loads(line) for line in (tmp_path / "save" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and any(row["staleness/interrupted"] > 0 for row in rows)
    assert all(row["mismatch/mean_abs"] < bound for row in rows), rows
