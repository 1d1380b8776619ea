"""Model FLOPs against torch's own count of transformers' models, and rates by hand."""

import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    NemotronHConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_grpo.estimate import throughput
from megatron_grpo.estimate.throughput import ModelFlops, peak_tflops, rates
from megatron_grpo.models.arguments import check_model, resolve_model_sizes
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.arguments import replaced, resolved
from megatron_grpo.weights import families
from megatron_grpo.weights.arguments import resolve_architecture

SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 100,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
MODELS = {
    "dense": (Qwen3ForCausalLM, Qwen3Config(**SHAPE)),
    "tied": (Qwen3ForCausalLM, Qwen3Config(**SHAPE | {"tie_word_embeddings": True})),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SHAPE | EXPERTS)),
    "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig(**SHAPE | GEMMA4)),
    "gemma4 with experts": (Gemma4ForCausalLM, Gemma4TextConfig(**SHAPE | GEMMA4 | GEMMA4_EXPERTS)),
    "latent": (DeepseekV3ForCausalLM, DeepseekV3Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"} | LATENT)),
}


def arguments(config, *flags):
    args = parse_args(list(flags))
    stored = json.loads(config.to_json_string(use_diff=False))
    stored["architectures"] = None  # model_type says it
    args = replaced(
        args, **resolve_architecture(args, families.for_hf_config(stored).args_from_hf(stored), "config.json")
    )
    args = resolved(args, check_model, resolve_model_sizes)
    return args


@pytest.mark.parametrize("name", MODELS)
def test_as_torch_counts_them(name):
    """transformers computes all pairs and all logits; each pair is then twice one that causality leaves, but for the
    diagonal: of l tokens l (l + 1) / 2 remain of l^2.
    """
    kind, config = MODELS[name]
    config._attn_implementation = config._experts_implementation = "eager"
    model, length = kind(config), 7
    flops = ModelFlops(arguments(config, "--transformer-impl", "local"))
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.arange(length)[None])
    per_pair = sum(layers * of_layer for (_, of_layer), layers in flops.attention.items())
    expected = counted.get_total_flops() - length * (length - 1) // 2 * per_pair
    assert flops.forward(np.array([length]), np.array([length])) == expected


def test_by_hand():
    args = arguments(Qwen2Config(**SHAPE, use_sliding_window=False))
    head = 16
    layer = 32 * (4 + 2 + 2) * head + 4 * head * 32 + 3 * 32 * 40
    lengths, labels = np.array([5, 2]), np.array([3, 0])
    pairs = (1 + 2 + 3 + 4 + 5) + (1 + 2)
    forward = 3 * (2 * layer * 7 + 2 * 4 * (head + head) * pairs) + 2 * 32 * 100 * 3
    assert ModelFlops(args).forward(lengths, labels) == forward
    assert ModelFlops(args).update(lengths, labels) == pytest.approx(3 * forward / 1e12)


def test_delta_nets_by_hand():
    """Of three layers the second attends, with an output gate; the others have 2 key heads and 4 value heads."""
    linear, full = "linear_attention", "full_attention"
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    config = Qwen3_5TextConfig(**SHAPE, **sizes, linear_value_head_dim=6, layer_types=[linear, full, linear])
    args = arguments(config, "--transformer-impl", "local")
    mlp, head = 3 * 32 * 40, 16
    attention = 32 * (2 * 4 + 2 + 2) * head + 4 * head * 32
    net = 32 * (2 * 2 * 8 + 2 * 4 * 6 + 2 * 4) + 4 * 6 * 32
    tokens, pairs = 5 + 2, (1 + 2 + 3 + 4 + 5) + (1 + 2)
    # For each value head: what the state recalls for the key, the correction, and the output for the query.
    recurrence = 2 * 3 * 4 * 8 * 6
    layers = 2 * (attention + 2 * net + 3 * mlp) * tokens + 2 * recurrence * tokens + 2 * 4 * (head + head) * pairs
    lengths, labels = np.array([5, 2]), np.array([3, 0])
    assert ModelFlops(args).forward(lengths, labels) == layers + 2 * 32 * 100 * 3
    args = replaced(args, max_prompt_length=2, max_completion_length=5)
    costs, _ = throughput.stage_costs(args)
    pairs_of_longest = 2 * 4 * (head + head) * (7 * 8 // 2) / 7
    assert costs[0] == costs[2] == 3 * (2 * (net + mlp) + recurrence)
    assert costs[1] == 3 * (2 * (attention + mlp) + pairs_of_longest)


def test_mamba_by_hand():
    """Of four layers two are Mamba-2 with 2 groups and 6 heads, one attends, one is an MLP without a gate."""
    shape = {key: value for key, value in SHAPE.items() if key not in ("num_hidden_layers", "hidden_act")}
    sizes = {"ssm_state_size": 8, "mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 2}
    config = NemotronHConfig(**shape, **sizes, hybrid_override_pattern="M*-M")
    args = arguments(config, "--transformer-impl", "local")
    mlp, head = 2 * 32 * 40, 16
    attention = 32 * (4 + 2 + 2) * head + 4 * head * 32
    mixer = 32 * (2 * 6 * 5 + 2 * 2 * 8 + 6) + 6 * 5 * 32
    tokens, pairs = 5 + 2, (1 + 2 + 3 + 4 + 5) + (1 + 2)
    recurrence = 2 * 2 * 6 * 8 * 5  # of each head: what a token writes to the state, and its output
    layers = 2 * (attention + 2 * mixer + mlp) * tokens + 2 * recurrence * tokens + 2 * 4 * (head + head) * pairs
    lengths, labels = np.array([5, 2]), np.array([3, 0])
    assert ModelFlops(args).forward(lengths, labels) == layers + 2 * 32 * 100 * 3
    args = replaced(args, max_prompt_length=2, max_completion_length=5)
    costs, _ = throughput.stage_costs(args)
    pairs_of_longest = 2 * 4 * (head + head) * (7 * 8 // 2) / 7
    assert costs == [3 * (2 * mixer + recurrence), 3 * (2 * attention + pairs_of_longest), 3 * 2 * mlp, costs[0]]


def test_adapters_by_hand():
    """A frozen matrix has one product in the backward pass, a trained one two."""
    config = Qwen2Config(**SHAPE, use_sliding_window=False)
    whole = ModelFlops(arguments(config))
    args = arguments(config, "--lora-rank", "2", "--lora-target-modules", "v_proj", "down_proj")
    args = replaced(args, padded_vocab_size=100)
    lengths, labels = np.array([5, 2]), np.array([3, 0])
    adapters = 3 * 2 * 2 * ((32 + 2 * 16) + (40 + 32)) * 7
    pairs = 3 * 2 * 4 * (16 + 16) * (1 + 2 + 3 + 4 + 5 + 1 + 2)
    frozen = whole.forward(lengths, labels) - pairs
    assert ModelFlops(args).forward(lengths, labels) == frozen + pairs + adapters
    assert ModelFlops(args).update(lengths, labels) == pytest.approx((2 * frozen + 3 * (pairs + adapters)) / 1e12)


def test_a_window_leaves_pairs_out():
    args = arguments(Qwen3Config(**SHAPE))
    lengths, none = np.array([5, 2]), np.array([0, 0])
    whole = ModelFlops(args).forward(lengths, none)
    args = replaced(args, window_size=(1, 0), window_attn_skip_freq=[1, 0, 1])  # two of three layers see one token back
    flops = ModelFlops(args)
    assert whole - flops.forward(lengths, none) == 2 * flops.per_pair * ((15 + 3) - (1 + 2 + 2 + 2 + 2) - (1 + 2))


def test_prediction_layers_count_where_they_are_trained():
    config = DeepseekV3Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"} | LATENT)
    config.num_nextn_predict_layers = 1
    one = np.array([1])
    kept = ModelFlops(arguments(config)).forward(one, one)
    trained = ModelFlops(arguments(config, "--mtp-loss-scaling-factor", "0.1")).forward(one, one)
    heads = 4 * (8 + 4)
    attention = 32 * 12 + 12 * heads + 32 * (10 + 4) + 10 * 4 * (8 + 6) + 4 * 6 * 32
    experts = 3 * 32 * 24 * (2 + 1) + 4 * 32  # two of four, the shared one, and the router
    pair = 2 * 4 * (8 + 4 + 6)
    assert trained - kept == 2 * (attention + experts + 2 * 32 * 32 + 32 * 100) + pair


def test_rates_of_a_row():
    row = {"tokens/update": 600, "tokens/rollout": 300, "flops/update": 80.0}
    row |= {"time/step": 6.0, "time/update": 2.0, "time/rollout": 3.0}
    assert rates(row, 4, None, False) == {"perf/tokens_per_second": 100.0}
    assert rates(row, 4, 50.0, False) == {"perf/tokens_per_second": 100.0, "perf/mfu": 0.2}
    assert rates(row, 4, 50.0, True) == {
        "perf/tokens_per_second": 100.0,
        "perf/mfu": 0.2,
        "perf/tokens_per_second_per_device": 25.0,
        "perf/update_tokens_per_second": 300.0,
        "perf/rollout_tokens_per_second": 100.0,
        "perf/tflops_per_device": 10.0,
    }
    assert rates({"time/eval": 2.0, "time/step": 3.0}, 4, 50.0, True) == {}


@pytest.mark.parametrize(
    ("device", "flags", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "--bf16", 989.0),
        ("NVIDIA H100 PCIe", "--bf16", 756.0),
        ("NVIDIA H200", "--bf16", 989.0),
        ("NVIDIA H200", "--bf16 --fp8-format e4m3", 989.0),  # not 1,979: figures compare with those in bf16
        ("NVIDIA H20", "--fp16", 148.0),
        ("NVIDIA GB200", "--bf16", 2500.0),
        ("NVIDIA A100-SXM4-80GB", "--bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "", None),  # float32 has another peak
        ("Tomorrow's", "--bf16", None),
        ("Tomorrow's", "--bf16 --device-peak-tflops 5000", 5000.0),
        (None, "--bf16", None),
        (None, "--device-peak-tflops 0.1", 0.1),
    ],
)
def test_peaks_by_name(device, flags, peak, monkeypatch):
    monkeypatch.setattr(throughput.torch.cuda, "is_available", lambda: device is not None)
    monkeypatch.setattr(throughput.torch.cuda, "get_device_name", lambda: device)
    assert peak_tflops(parse_args(flags.split())) == peak
