"""Whole published configurations: each has a family, and the dry run counts the parameters that transformers counts."""

import pytest
import torch
from instruct_models import NAMES, published
from slow import slow_except

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from megatron_grpo.estimate.memory import Plan
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.resolve import resolve_args
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.weights import families
from megatron_grpo.weights.arguments import resolve_architecture

CARDS = {  # 10^9 parameters, as the model cards say
    "DeepSeek-R1-Distill-Qwen-7B": 7.6,
    "DeepSeek-V3-0324": 671,
    "GLM-4-9B-0414": 9,
    "GLM-4.5-Air": 106,
    "GLM-4.7-Flash": 30,
    "Kimi-K2-Instruct": 1000,
    "Kimi-K2.5": 1000,
    "Llama-3.1-8B-Instruct": 8,
    "Llama-3.2-3B-Instruct": 3.21,
    "MiniMax-M2.5": 228.7,
    "Mistral-Nemo-Instruct-2407": 12.2,
    "Mixtral-8x7B-Instruct-v0.1": 46.7,
    "Moonlight-16B-A3B-Instruct": 16,
    "NVIDIA-Nemotron-3-Nano-30B-A3B": 31.6,
    "NVIDIA-Nemotron-Nano-9B-v2": 8.9,
    "Phi-3-mini-4k-instruct": 3.8,
    "Phi-3.5-mini-instruct": 3.8,
    "Qwen2.5-7B-Instruct": 7.61,
    "Qwen3-30B-A3B-Instruct-2507": 30.5,
    "Qwen3-8B": 8.2,
    "Qwen3-Next-80B-A3B-Instruct": 80,
    "Qwen3.5-27B": 27,
    "Qwen3.5-35B-A3B": 35,
    "gemma-2-2b-it": 2.6,
    "gemma-3-1b-it": 1,
    "gemma-4-26B-A4B-it": 25.2,
    "gemma-4-E2B-it": 4.6,
    "gpt-oss-20b": 21,
    "phi-4": 14,
}
FEW = ("NVIDIA-Nemotron-Nano-9B-v2", "Moonlight-16B-A3B-Instruct", "gemma-3-1b-it", "gpt-oss-20b", "phi-4")
FLAGS = """--lr 1e-3 --train-iters 1 --global-batch-size 64 --transformer-impl local --dry-run --load-hf unused
    --max-prompt-length 128 --max-completion-length 128"""


def text_part(name: str) -> dict:
    """Return the published keys of the language model."""
    config = published(name, "config.json")
    return config.get("text_config", config)


def transformers_count(name: str, with_tower: bool) -> int:
    """Return the parameters of transformers' model, which takes no memory; routers' biases are buffers, as here."""
    config = published(name, "config.json") if with_tower else text_part(name)
    keys = {key: value for key, value in config.items() if key not in ("model_type", "auto_map", "quantization_config")}
    own = {"kimi_k2": "deepseek_v3"}  # Kimi-K2's code is DeepSeek-V3's; transformers does not know the name
    model_type = own.get(config["model_type"], config["model_type"])
    model_class = AutoModelForImageTextToText if with_tower else AutoModelForCausalLM
    with torch.device("meta"):
        model = model_class.from_config(AutoConfig.for_model(model_type, **keys))
    return sum(parameter.numel() for parameter in model.parameters())


def arguments(name: str):
    config = published(name, "config.json")
    args = parse_args(FLAGS.split())
    return replaced(args, **resolve_architecture(args, families.for_hf_config(config).args_from_hf(config), name))


def test_every_model_has_its_card():
    assert sorted(CARDS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_family_reads_the_whole_config(name):
    config, args = text_part(name), arguments(name)
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    read = (args.num_layers, args.hidden_size, args.num_attention_heads, args.vocab_size, args.max_position_embeddings)
    assert read == tuple(config[key] for key in shape)
    if args.position_embedding_type == "rope":
        rope = config.get("rope_parameters", {})
        assert args.rotary_base == {**config, **rope.get("full_attention", rope)}["rope_theta"]


@pytest.mark.parametrize("name", slow_except(FEW, NAMES))
def test_the_dry_run_counts_the_parameters_of_a_published_config(name):
    args = resolve_args(arguments(name), 1)
    count = Plan(args).whole_model()
    assert count == transformers_count(name, bool(args.vision_config))
    assert count == pytest.approx(CARDS[name] * 1e9, rel=0.05)
