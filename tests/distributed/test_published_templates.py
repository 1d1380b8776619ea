"""Six turns with tools under published chat templates: trainer and engine agree on every sampled token."""

import json
from pathlib import Path

import pytest
import torch
from instruct_models import build_tokenizer
from ranks import run_torchrun
from run_files import metrics_of
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = [pytest.mark.vllm, pytest.mark.distributed, pytest.mark.slow]
PLUGIN = Path(__file__).resolve().parents[1] / "data" / "answered_calls.py"
ENDS = {  # of turns, in the template and in the model's generation_config.json
    "GLM-4.5-Air": "<|observation|>",
    "GLM-4.7-Flash": "<|observation|>",
    "Kimi-K2-Instruct": "<|im_end|>",
    "Kimi-K2.5": "<|im_end|>",
    "Llama-3.1-8B-Instruct": "<|eot_id|>",
    "Llama-3.2-3B-Instruct": "<|eot_id|>",
    "MiniMax-M2.5": "[e~[",
    "Mistral-Nemo-Instruct-2407": "</s>",
    "NVIDIA-Nemotron-3-Nano-30B-A3B": "<|im_end|>",
    "NVIDIA-Nemotron-Nano-9B-v2": "<SPECIAL_12>",
    "Qwen2.5-7B-Instruct": "<|im_end|>",
    "Qwen3-30B-A3B-Instruct-2507": "<|im_end|>",
    "Qwen3-8B": "<|im_end|>",
    "Qwen3.5-27B": "<|im_end|>",
    "gemma-4-E2B-it": "<|tool_response>",
    "gpt-oss-20b": "<|call|>",
}


def write_model(directory, ids, end):
    """Write a random model whose every token is ``end`` with a probability of about 0.1."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=256 + len(ids), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=False,
        eos_token_id=ids[end],
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.normal_(std=0.5)[:, 0] = 3.0  # so that this channel is large behind the last norm
        head.normal_(std=0.05)[:, 0] = 0.0
        head[ids[end], 0] = 0.7
    model.save_pretrained(directory)


@pytest.mark.parametrize("name", ENDS)
def test_log_probabilities_agree(name, tmp_path):
    model, data, save = tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "run"
    ids = build_tokenizer(name, tmp_path / "tokenizer")
    write_model(model, ids, ENDS[name])
    rows = [{"messages": [{"role": "user", "content": f"what is {i} and {i}?"}]} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"""--load-hf {model} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/tokenizer
        --train-data-path {data} --external-plugins {PLUGIN} --environment answered_calls --tool-call-parser every_turn
        --max-turns 6 --max-prompt-length 4000 --max-completion-length 400 --max-environment-tokens 1500
        --reward-funcs environment --num-generations 4 --micro-batch-size 4 --global-batch-size 16 --lr 1e-3
        --transformer-impl local --train-iters 1 --num-completions-to-log 16 --save {save} --no-save-hf"""
    run_torchrun(1, "pretrain_grpo.py", *flags.split())
    (row,) = metrics_of(save)
    print(
        f"{name}: {row['environment/turns']:.1f} turns, {row['completion/length_mean']:.0f} sampled tokens, "
        f"mean {row['mismatch/mean_abs']:.1e}, largest {row['mismatch/max_abs']:.1e}"
    )
    assert row["environment/turns"] > 4 and row["environment/failed"] == 0 and row["grad_norm"] > 0
    assert row["mismatch/max_abs"] < 1e-5
    masks = [json.loads(line)["response_mask"] for line in (save / "completions.jsonl").read_text().splitlines()]
    begun = [sum(m and not before for m, before in zip(mask, [0, *mask])) for mask in masks]
    assert sum(begun) / len(begun) == row["environment/turns"]  # between two turns are tokens that were not sampled
