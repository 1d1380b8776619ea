"""config.json <-> arguments: published configurations, transformers' own classes, and refusals."""

import json
from argparse import Namespace
from math import prod

import pytest
import torch
from instruct_models import published
from ranks import REPO
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from megatron_grpo.models.config import attention_layers, mlp_layers, moe_layers, recurrent_layers
from megatron_grpo.models.gemma4 import layer_kinds
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import families
from megatron_grpo.weights.families.common import ABSENT
from megatron_grpo.weights.model_weights import table

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {  # of the long factors only the first and the last are the published ones
        "long_factor": [1.0 + i * (47.77 - 1.0) / 47 for i in range(48)],
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
(
    DEEPSEEK_V3,
    GEMMA2_2B,
    GEMMA3_1B,
    GLM45_AIR,
    GLM47_FLASH,
    GLM4_9B_0414,
    GPT_OSS_20B,
    LLAMA31_8B,
    MINIMAX_M25,
    MIXTRAL_8X7B,
    NEMOTRON_NANO_9B_V2,
) = (
    published(name, "config.json")
    for name in (
        "DeepSeek-V3-0324",
        "gemma-2-2b-it",
        "gemma-3-1b-it",
        "GLM-4.5-Air",
        "GLM-4.7-Flash",
        "GLM-4-9B-0414",
        "gpt-oss-20b",
        "Llama-3.1-8B-Instruct",
        "MiniMax-M2.5",
        "Mixtral-8x7B-Instruct-v0.1",
        "NVIDIA-Nemotron-Nano-9B-v2",
    )
)
GLM4_9B_CHAT = {
    **GLM4_9B_0414,
    "architectures": ["GlmForCausalLM"],
    "max_position_embeddings": 131072,
    "model_type": "glm",
    "rms_norm_eps": 1.5625e-07,
}
# Qwen3-Next-80B-A3B: transformers' defaults are its sizes; the rotary base is from memory.
QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
QWEN35_27B, QWEN35_35B_A3B, GEMMA4_E2B, GEMMA4_26B = (
    json.loads((REPO / "tests/data/instruct_models" / name / "config.json").read_text())
    for name in ("Qwen3.5-27B", "Qwen3.5-35B-A3B", "gemma-4-E2B-it", "gemma-4-26B-A4B-it")
)


def _text_part(config: dict, architecture: str) -> dict:
    """The language model of a vision-language config.json, as transformers writes it alone."""
    text = {**config["text_config"], "architectures": [architecture]}
    rope = {key: value for key, value in text["rope_parameters"].items() if not key.startswith("mrope")}
    return {**text, "rope_parameters": rope, "tie_word_embeddings": config["tie_word_embeddings"]}


def _other_rope(**change) -> dict:
    """Gemma 4's rotary parameters, with a change in layers without a window."""
    rope = GEMMA4_E2B["text_config"]["rope_parameters"]
    return {**rope, "full_attention": {**rope["full_attention"], **change}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
CONFIGS = {
    "gpt_oss": GPT_OSS_20B,
    "gemma2": GEMMA2_2B,
    "gemma3_text": GEMMA3_1B,
    "gemma4_text": _text_part(GEMMA4_E2B, "Gemma4ForCausalLM"),
    "glm4": GLM4_9B_0414,
    "glm": GLM4_9B_CHAT,
    "mistral": MISTRAL_7B,
    "minimax_m2": MINIMAX_M25,
    "mixtral": MIXTRAL_8X7B,
    # transformers refuses its own spelling of an infinite bound.
    "nemotron_h": {key: value for key, value in NEMOTRON_NANO_9B_V2.items() if key != "time_step_limit"},
    "phi3": PHI4_MINI,
    "glm4_moe": GLM45_AIR,
    "glm4_moe_lite": GLM47_FLASH,
    "qwen3": QWEN3_06B,
    "qwen2": QWEN25_05B,
    "llama": LLAMA31_8B,
    "qwen3_moe": QWEN3_30B_A3B,
    "deepseek_v2": DEEPSEEK_V2_LITE,
    "deepseek_v3": DEEPSEEK_V3,
    "qwen3_next": QWEN3_NEXT_80B,
    "qwen3_5_text": _text_part(QWEN35_27B, "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": _text_part(QWEN35_35B_A3B, "Qwen3_5MoeForCausalLM"),
}
CLASSES = {
    "gpt_oss": GptOssConfig,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "gemma4_text": Gemma4TextConfig,
    "glm4": Glm4Config,
    "glm": GlmConfig,
    "mistral": MistralConfig,
    "minimax_m2": MiniMaxM2Config,
    "mixtral": MixtralConfig,
    "nemotron_h": NemotronHConfig,
    "phi3": Phi3Config,
    "glm4_moe": Glm4MoeConfig,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "qwen3": Qwen3Config,
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5_text": Qwen3_5TextConfig,
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig,
}


def test_published_configurations_become_megatron_arguments():
    qwen3 = families.for_hf_config(QWEN3_06B).args_from_hf(QWEN3_06B)
    assert qwen3 == {
        **ABSENT,
        "model_family": "qwen3",
        "num_layers": 28,
        "hidden_size": 1024,
        "ffn_hidden_size": 3072,
        "num_attention_heads": 16,
        "group_query_attention": True,
        "num_query_groups": 8,
        "kv_channels": 128,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "position_embedding_type": "rope",
        "rotary_base": 1000000,
        "untie_embeddings_and_output_weights": False,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "num_experts": None,
        "multi_latent_attention": False,
    }
    qwen2 = families.for_hf_config(QWEN25_05B).args_from_hf(QWEN25_05B)
    assert (qwen2["add_qkv_bias"], qwen2["qk_layernorm"], qwen2["kv_channels"]) == (True, False, 64)
    llama = families.for_hf_config(LLAMA31_8B).args_from_hf(LLAMA31_8B)
    assert (llama["rope_scaling"], llama["rotary_base"]) == (LLAMA31_8B["rope_scaling"], 500000)
    assert (llama["untie_embeddings_and_output_weights"], llama["kv_channels"]) == (True, 128)


def test_published_gemmas_and_glms_become_megatron_arguments():
    names = "gemma2", "gemma3_text", "glm4", "glm"
    found = [families.for_hf_config(CONFIGS[name]).args_from_hf(CONFIGS[name]) for name in names]
    expected = {
        "softmax_scale": (1 / 16, 1 / 16, None, None),
        "window_size": ([4095, 0], [511, 0], None, None),
        "window_attn_skip_freq": (2, 6, None, None),
        "attn_logit_softcapping": (50.0, None, None, None),
        "final_logit_softcapping": (30.0, None, None, None),
        "rotary_base": (10000, 1000000, 10000, 10000),
        "rotary_base_local": (None, 10000, None, None),
        "rotary_percent": (1.0, 1.0, 0.5, 0.5),
        "rotary_interleaved": (False, False, True, True),
        "sandwich_norm": (True, True, True, False),
        "apply_layernorm_1p": (True, True, False, False),
        "scale_embeddings": (True, True, False, False),
        "qk_layernorm": (False, True, False, False),
        "add_qkv_bias": (False, False, True, True),
        "geglu": (True, True, False, False),
        "swiglu": (False, False, True, True),
        "untie_embeddings_and_output_weights": (False, False, True, True),
    }
    assert {key: tuple(arguments[key] for arguments in found) for key in expected} == expected


def test_the_layers_of_published_gemma4s():
    """E2B shares the keys of layers 14 and 15 (from 1) among 20 layers; 26B has keys for values where all is seen."""
    for config, layers, kinds in (
        (GEMMA4_E2B, 35, {(256, 1, True, 6144), (256, 1, False, 12288), (512, 1, True, 6144), (512, 1, False, 12288)}),
        (GEMMA4_26B, 30, {(256, 8, True, 2112), (512, 2, True, 2112)}),
    ):
        args = model_args(families.for_hf_config(config).args_from_hf(config))
        found = layer_kinds(args)
        assert len(found) == layers
        assert {(kind.channels, kind.groups, kind.has_keys, kind.ffn) for kind in found} == kinds
        assert [kind.windowed for kind in found] == [
            kind == "sliding_attention" for kind in config["text_config"]["layer_types"]
        ]
    assert not any(kind.has_values for kind in found if not kind.windowed)
    found = families.for_hf_config(GEMMA4_26B).args_from_hf(GEMMA4_26B)
    expected = {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 704, "softmax_scale": 1.0}
    assert {key: found[key] for key in expected} == expected
    e2b = model_args(families.for_hf_config(GEMMA4_E2B).args_from_hf(GEMMA4_E2B))
    assert {kind.source for kind in layer_kinds(e2b)[15:]} == {13, 14}


def test_rotary_embeddings_of_both_kinds_of_gemma3s_layers():
    """MedGemma 27B's: scaled where there is no window."""
    scaling = {"factor": 8.0, "rope_type": "linear"}
    config = {**GEMMA3_1B, "rope_scaling": scaling, "rope_local_base_freq": 5000.0}
    found = families.for_hf_config(config).args_from_hf(config)
    assert (found["rope_scaling"], found["rotary_base"], found["rotary_base_local"]) == (scaling, 1000000, 5000)
    assert families.for_hf_config(config).args_from_hf(Gemma3TextConfig.from_dict(config).to_dict()) == found


def test_published_mixtures_of_experts_become_megatron_arguments():
    """The flags of Megatron-LM's own recipe for DeepSeek-V3, and of Qwen3's."""
    qwen3 = families.for_hf_config(QWEN3_30B_A3B).args_from_hf(QWEN3_30B_A3B)
    deepseek = families.for_hf_config(DEEPSEEK_V3).args_from_hf(DEEPSEEK_V3)
    expected = {
        "num_experts": (128, 256),
        "moe_ffn_hidden_size": (768, 2048),
        "ffn_hidden_size": (6144, 18432),
        "moe_layer_freq": (1, [0] * 3 + [1] * 58),
        "moe_router_topk": (8, 8),
        "moe_router_score_function": ("softmax", "sigmoid"),
        "moe_router_enable_expert_bias": (False, True),
        "moe_router_group_topk": (None, 4),
        "moe_router_topk_scaling_factor": (None, 2.5),
        "moe_shared_expert_intermediate_size": (None, 2048),
        "multi_latent_attention": (False, True),
        "qk_layernorm": (True, True),
        "kv_channels": (128, 128),
    }
    assert {key: (qwen3[key], deepseek[key]) for key in expected} == expected
    assert qwen3["moe_router_pre_softmax"] is False
    alone = {
        "moe_router_num_groups": 8,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "rope_type": "yarn",
        "rotary_scaling_factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "mtp_num_layers": 1,
        "group_query_attention": False,
    }
    assert {key: deepseek[key] for key in alone} == alone
    lite = families.for_hf_config(DEEPSEEK_V2_LITE).args_from_hf(DEEPSEEK_V2_LITE)
    assert (lite["moe_router_pre_softmax"], lite["q_lora_rank"], lite["mscale"]) == (True, None, 0.707)
    assert lite["moe_shared_expert_intermediate_size"] == 2816


def model_args(arguments) -> Namespace:
    """Return the arguments of a config.json as the run has them; some leave multi-token prediction to a flag."""
    return Namespace(**{"mtp_num_layers": None, **arguments})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}),
        ("qwen3_moe", {"mlp_only_layers": [0, 3]}),
        ("deepseek_v3", {"first_k_dense_replace": 2}),
        ("deepseek_v2", {"first_k_dense_replace": 0}),
        ("glm4_moe_lite", {"first_k_dense_replace": 2, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3}),
    ],
)
def test_layers_with_experts_are_those_of_transformers(name, change):
    config = {**CONFIGS[name], **change, "num_hidden_layers": 5}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CLASSES[name].from_dict(dict(config)))
    expected = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    family = families.for_hf_config(config)
    arguments = family.args_from_hf(config)
    args = model_args(arguments)
    assert moe_layers(args) == expected
    assert family.args_from_hf(family.hf_from_args(args)) == arguments


def test_the_text_part_of_a_vision_language_model_is_read():
    """Published Qwen3.5 models have a vision tower; the language model within is that of the text families."""
    names = (QWEN35_27B, "qwen3_5_text"), (QWEN35_35B_A3B, "qwen3_5_moe_text"), (GEMMA4_E2B, "gemma4_text")
    for whole, name in names:
        family = families.for_hf_config(whole, name)
        assert family.name == name
        assert family.args_from_hf(whole) == families.FAMILIES[name].args_from_hf(CONFIGS[name])
    found = families.for_hf_config(QWEN35_35B_A3B, "qwen3_5_moe_text").args_from_hf(QWEN35_35B_A3B)
    expected = {
        "linear_attention_freq": 4,
        "experimental_attention_variant": "gated_delta_net",
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "rotary_percent": 0.25,
        "rotary_base": 10000000,
        "attention_output_gate": True,
        "apply_layernorm_1p": True,
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": 512,
        "moe_router_pre_softmax": False,
        "num_experts": 256,
        "moe_router_topk": 8,
        "kv_channels": 256,
    }
    assert {key: found[key] for key in expected} == expected


# vLLM ignores the window of a model with layers of two kinds.
@pytest.mark.parametrize(
    "change", [{}, {"layer_types": ["full_attention"] + ["linear_attention"] * 4}, {"sliding_window": 8}]
)
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_layers_with_delta_nets_are_those_of_transformers(name, change):
    config = {key: value for key, value in CONFIGS[name].items() if key != "layer_types"}
    config |= {"num_hidden_layers": 5, **change}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CLASSES[name].from_dict(dict(config)))
    family = families.for_hf_config(config)
    arguments = family.args_from_hf(config)
    args = model_args(arguments)
    assert recurrent_layers(args) == [hasattr(layer, "linear_attn") for layer in model.model.layers]
    assert family.args_from_hf(family.hf_from_args(args)) == arguments


# The experts of Nemotron 3 Nano 30B-A3B (aiconfigurator's copy), for which its config.json has other sizes, too.
NANO_3 = {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}


@pytest.mark.parametrize("change", [{}, NANO_3])
def test_layers_of_nemotron_are_those_of_transformers(change):
    config = NEMOTRON_NANO_9B_V2 | change
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(NemotronHConfig.from_dict(dict(config)))
    family = families.for_hf_config(config)
    arguments = family.args_from_hf(config)
    args = model_args(arguments)
    mixers = [layer.mixer for layer in model.model.layers]
    assert recurrent_layers(args) == [hasattr(mixer, "A_log") for mixer in mixers]
    assert attention_layers(args) == [hasattr(mixer, "q_proj") for mixer in mixers]
    assert mlp_layers(args) == [hasattr(mixer, "up_proj") or hasattr(mixer, "experts") for mixer in mixers]
    assert not change or moe_layers(args) == [hasattr(mixer, "experts") for mixer in mixers]
    assert sum(map(prod, _shapes(args))) == sum(parameter.numel() for parameter in model.parameters())
    written = family.hf_from_args(args)
    assert family.args_from_hf(written) == arguments
    # As transformers 5 writes it: names of layers in place of letters.
    again = NemotronHConfig.from_dict(dict(written)).to_dict() | {"architectures": config["architectures"]}
    assert "hybrid_override_pattern" not in again and family.args_from_hf(again) == arguments


def _shapes(args):
    """The shapes of all tensors in the files but the routers' biases, which are buffers in transformers."""
    weights = table(replaced(args, padded_vocab_size=args.vocab_size))
    return [shape for one in weights if not one.name.endswith("expert_bias") for shape in one.hf.values()]


def test_megatron_counts_every_nth_layer_from_the_first():
    assert moe_layers(Namespace(num_layers=5, moe_layer_freq=2)) == [True, False, True, False, True]


def test_dense_layers_after_others_are_no_deepseek():
    args = Namespace(**families.FAMILIES["deepseek_v3"].args_from_hf(DEEPSEEK_V3))
    args = replaced(args, moe_layer_freq=2)
    with pytest.raises(GrpoError, match="has all dense layers before the expert layers, but moe_layer_freq is 2"):
        families.for_args(args).hf_from_args(args)
    args = replaced(args, moe_layer_freq=1, moe_shared_expert_intermediate_size=3000)
    with pytest.raises(GrpoError, match=r"moe_shared_expert_intermediate_size \(3000\) is not a multiple"):
        families.for_args(args).hf_from_args(args)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "nemotron_h"])  # it has no rotary embedding
def test_both_spellings_of_rope_give_the_same_arguments(name):
    """transformers 5 writes rope_parameters in place of rope_theta and rope_scaling."""
    new = CLASSES[name].from_dict(dict(CONFIGS[name])).to_dict()
    assert "rope_parameters" in new and "rope_theta" not in new
    family = families.for_hf_config(CONFIGS[name])
    assert family.args_from_hf(new) == family.args_from_hf(CONFIGS[name])


# Not the model's arguments, or written in another way.
NOT_ARGUMENTS = """bos_token_id eos_token_id pad_token_id dtype max_window_layers cache_implementation auto_map ep_size
    sliding_window_pattern use_mtp num_mtp_modules mtp_transformer_layers
    quantization_config experts_per_token initial_context_length router_aux_loss_coef
    attn_output_gate full_attention_interval mtp_num_hidden_layers
    mtp_use_dedicated_embeddings""".split()


@pytest.mark.parametrize("name", CONFIGS)
def test_arguments_become_the_configuration_again(name):
    family = families.for_hf_config(CONFIGS[name])
    arguments = family.args_from_hf(CONFIGS[name])
    args = model_args(arguments)
    assert families.for_args(args) is family
    written = family.hf_from_args(args)
    assert family.args_from_hf(written) == arguments
    ours, theirs = (CLASSES[name].from_dict(dict(c)).to_dict() for c in (written, CONFIGS[name]))
    for key in NOT_ARGUMENTS:
        ours.pop(key, None), theirs.pop(key, None)
    if name == "qwen3_next":
        assert ours.pop("mamba_ssm_dtype") == "float32"  # not published with this family
        assert ours.pop("num_nextn_predict_layers") == 0
    if name == "qwen3_5_moe_text":
        assert ours.pop("intermediate_size") == 512  # of no layer; our families need one
    if name == "qwen3_5_text":
        assert theirs.pop("mlp_only_layers") == []  # of no layer
    if name == "mixtral":
        assert ours.pop("head_dim") == 128 and theirs.pop("head_dim") is None  # 4096 / 32
    if name == "phi3":  # switches that transformers does not know, and the old name of a key
        assert not any(theirs.pop(key) for key in ("attention_bias", "mlp_bias", "lm_head_bias"))
        assert theirs["rope_parameters"].pop("type") == "longrope"
    if name == "glm4_moe_lite":  # says that whole heads are rotated
        assert theirs.pop("partial_rotary_factor") == theirs["rope_parameters"].pop("partial_rotary_factor") == 1.0
    if name == "nemotron_h":
        assert theirs.pop("time_step_rank") == 256  # read by neither
    assert ours == theirs
    if name == "nemotron_h":
        return
    # What knows only one of the two spellings finds it.
    rope = written["rope_parameters"]
    if name != "gemma4_text":  # younger than the second spelling
        assert written["rope_theta"] == rope.get("full_attention", rope)["rope_theta"] == arguments["rotary_base"]


def test_model_type_serves_where_there_are_no_architectures():
    assert families.for_hf_config({"model_type": "llama"}).name == "llama"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*not supported.*Qwen3ForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "ForSequenceClassification"),
        ({"model_type": "bert"}, "model_type 'bert'"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "not supported: an indexer.*docs/sparse_attention.md"),
        ({"architectures": ["GlmMoeDsaForCausalLM"]}, "not supported: an indexer.*glm4_moe"),
        (
            {"architectures": ["MiniMaxM1ForCausalLM"]},
            "not supported: most layers have lightning attention, which needs a recurrence .*docs/sparse_attention.md",
        ),
    ],
)
def test_unknown_architectures_are_refused_by_name(config, message):
    with pytest.raises(GrpoError, match=message):
        families.for_hf_config(config)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen3", {"attention_bias": True}, "attention_bias true"),
        ("llama", {"attention_bias": True}, "attention_bias true"),
        ("llama", {"mlp_bias": True}, "mlp_bias true"),
        # Keys that vLLM applies, and transformers ignores.
        ("llama", {"qkv_bias": True}, "qkv_bias True, which the model here does not have: remove the key"),
        ("llama", {"logit_scale": 0.5}, "logit_scale 0.5, which"),
        ("llama", {"rotary_pct": 0.5}, "rotary_pct 0.5, which"),
        ("qwen2", {"qk_norm": True}, "qk_norm, which vLLM reads"),
        (
            "qwen3",
            {"dual_chunk_attention_config": {"chunk_size": 8}},
            "dual_chunk_attention_config {'chunk_size': 8}, wh",
        ),
        ("qwen3", {"rope_scaling": {"rope_type": "default", "rope_dim": 32}}, "rope_dim, which only vLLM reads"),
        ("mistral", {"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling {'beta': 0.1}, which"),
        ("gemma4_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping, which vLLM reads"),
        ("qwen3_next", {"layer_scale": True}, "layer_scale True: only False"),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window True: only False"),
        ("deepseek_v3", {"index_topk": 2048}, "index_topk 2048, which"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "attn_factor": 0.5}}, "'yarn' has 'attn_factor'"),
        ("deepseek_v3", {"topk_group": 0}, "n_group 8 and topk_group 0: give 1 <= topk_group <= n_group"),
        *(
            (name, {"sliding_window": 8}, "sliding_window 8, which transformers ignores")
            for name in ("llama", "glm", "glm4", "glm4_moe", "minimax_m2", "deepseek_v3")
        ),
        (
            "qwen3_next",
            {"sliding_window": 8, "layer_types": ["full_attention"] * QWEN3_NEXT_80B["num_hidden_layers"]},
            "sliding_window 8, which transformers ignores",
        ),
        # transformers applies it in every family.
        ("qwen3", {"is_causal": False}, "is_causal False, which"),
        ("qwen3", {"hidden_size": None}, "lacks 'hidden_size'"),
        ("qwen3", {"quantization_config": {"quant_method": "awq"}}, r"quant_method 'awq'; supported are fp8"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4},
            "sliding_window 64 in some",
        ),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, "sliding_window 32768 in some layers only"),
        (
            "mistral",
            {"layer_types": ["full_attention"] * 32},
            "4096 and layer_types with full_attention",
        ),
        ("mistral", {"attention_bias": True}, "attention_bias true"),
        ("minimax_m2", {"num_experts_per_tok": 1}, "num_experts_per_tok 1: Megatron-Core does not normalise"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax': only 'sigmoid'"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias False: only True"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head': only 'per_layer'"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "only full attention"),
        ("minimax_m2", {"tie_word_embeddings": True}, "tie_word_embeddings True: only False"),
        ("minimax_m2", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt 'e5m2': only e4m3"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok 1: the expert's weight is always 1"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias true"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "only type 'longrope' is supported for Phi-3"),
        ("phi3", {"rope_scaling": {**PHI4_MINI["rope_scaling"], "short_mscale": 1.1}}, "has 'short_mscale'"),
        ("glm4_moe_lite", {"norm_topk_prob": False}, "norm_topk_prob False: only True"),
        (
            "glm4_moe_lite",
            {"first_k_dense_replace": 2},
            "first_k_dense_replace 2, which vLLM reads, and mlp_layer_types",
        ),
        ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave False"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob False: only True"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' lacks 'original_max_position_emb"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling of type 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "by": 3}}, "'linear' has 'by', which is not supp"),
        (
            "llama",
            {"rope_scaling": {**YARN, "attention_factor": 1.0}},
            "'attention_factor', which is not supported: rem",
        ),
        (  # as published with DeepSeek-R1-0528-Qwen3-8B; vLLM 0.26 applies it, vLLM 0.32 and transformers do not
            "qwen3",
            {"rope_scaling": {**YARN, "attn_factor": 0.8782488562869419}},
            "'attn_factor', which is not supported: remove it from",
        ),
        ("llama", {"rope_scaling": {**YARN, "mscale": 1.0}}, "has 'mscale', which is not supported: remove it from"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor of the wrong type: '2'"),
        ("qwen3", {"num_hidden_layers": "2"}, "value of the wrong type: num_layers is '2'"),
        ("mistral", {"head_dim": "128"}, "value of the wrong type: kv_channels is '128'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama", {"rope_scaling": None, "rope_parameters": {"full_attention": {}}}, "each kind of layer"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu': only 'gelu_pytorch_tanh'"),
        ("gemma2", {"tie_word_embeddings": False}, "vLLM's Gemma 2 has no separate output layer"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention true"),
        ("gemma2", {"sliding_window": None}, "lacks 'sliding_window'"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "transformers ignores for Gemma 3"),
        (
            "gemma3_text",
            {"rope_scaling": {"type": "linear", "factor": 3.0}},
            "whose type transformers ignores: name it",
        ),
        ("gemma3_text", {"rope_scaling": YARN}, "only 'linear' in layers without a window is supported"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "only causal attention is supported"),
        ("gemma4_text", {"vocab_size_per_layer_input": 7}, r"vocab_size_per_layer_input 7: only vocab_size \(262144\)"),
        ("gemma4_text", {"layer_types": ["sliding_attention"] * 35}, "the last layer must be full_attention"),
        ("gemma4_text", {"num_kv_shared_layers": 31}, "needs one of its kind before the first of them"),
        ("gemma4_text", {"num_experts": 8}, "num_experts and no enable_moe_block"),
        (
            "gemma4_text",
            {"per_layer_config": {"4": {"head_dim": 64}}},
            "one head_dim and one num_key_value_heads",
        ),
        ("gemma4_text", {"rope_parameters": _other_rope(factor=2.0)}, "rope_type 'proportional' without a factor"),
        (
            "gemma4_text",
            {"rope_parameters": _other_rope(rope_type="yarn")},
            "rope_type 'proportional' without a factor",
        ),
        ("glm4", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling of type 'dynamic'"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias true"),
        ("qwen3_moe", {"num_experts": None}, "lacks 'num_experts'"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "norm_topk_prob true and num_experts_per_tok 1"),
        ("qwen3_moe", {"mlp_only_layers": list(range(48))}, "no layer with experts"),
        ("nemotron_h", {"residual_in_fp32": True}, "residual_in_fp32 True: only False"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings True: only False"),
        ("nemotron_h", {"conv_kernel": 3}, "conv_kernel 3: only 4"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias true"),
        ("nemotron_h", {"attention_head_dim": 64}, "attention_head_dim 64: name it head_dim"),
        ("nemotron_h", {"hybrid_override_pattern": "M-A"}, r"the layers 'M-A': only Mamba-2 \(M\), attention"),
        ("nemotron_h", {**NANO_3, "moe_latent_size": 64}, "moe_latent_size 64: only None"),
        ("nemotron_h", {**NANO_3, "n_shared_experts": 2}, "n_shared_experts 2: only 1"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate False: only True"),
        ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid': only 'silu'"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}, "layer_types of 3 layers"),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 64}, "64 layers, sliding_attention: give linear_att"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob False: every layer"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit 6.0: the engine supports only 7.0 for gpt-oss"),
        ("gpt_oss", {"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06: the engine supports only 1e-05 for gpt-oss"),
        ("gpt_oss", {"tie_word_embeddings": True}, "tie_word_embeddings True: the engine supports only False"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 12}, "a window only in the first, third"),
        ("gpt_oss", {"rope_scaling": None}, "the engine supports only yarn for gpt-oss"),
        (
            "gpt_oss",
            {"rope_scaling": {**GPT_OSS_20B["rope_scaling"], "attention_factor": 1.0}},
            "has 'attention_factor', which is not supported",
        ),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method group_limited_greedy: only greedy"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func softmax: only sigmoid"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob False: only True"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave False"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek_v3", {"topk_group": 2}, r"Megatron-Core by their best .* \(8\) // topk_group \(2\) = 4"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok 1: Megatron-Core does not normalise"),
        ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads 8 and num_attention_heads 128"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling of type 'linear'"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.7}}, "mscale 0.7 and mscale_all"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "attention_factor": 1.5}}, "attention_factor"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 40}}, "lacks 'original_max_position_embeddings'"),
    ],
)
def test_what_the_model_would_not_be_is_refused(name, change, message):
    config = {**CONFIGS[name], **change}
    with pytest.raises(GrpoError, match=message):
        families.for_hf_config(config).args_from_hf(config)


@pytest.mark.parametrize(
    ("name", "change", "window"),
    [
        ("qwen2", {}, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 24}, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, [32767, 0]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, [63, 0]),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, [63, 0]),  # max_window_layers is not heeded
        ("mistral", {}, [4095, 0]),
        ("mistral", {"sliding_window": None}, None),
        ("mixtral", {"sliding_window": 128}, [127, 0]),
        ("phi3", {}, [262143, 0]),
    ],
)
def test_windows_are_those_of_transformers(name, change, window):
    config = {**CONFIGS[name], **change}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CLASSES[name].from_dict({**config, "num_hidden_layers": 24}))
    sizes = {getattr(layer.self_attn, "sliding_window", model.config.sliding_window) for layer in model.model.layers}
    assert sizes == {window and window[0] + 1}
    family = families.for_hf_config(config)
    arguments = family.args_from_hf(config)
    assert (arguments["window_size"], arguments["window_attn_skip_freq"]) == (window, None)
    written = family.hf_from_args(model_args(arguments))
    assert family.args_from_hf(written) == arguments


def test_names_of_longrope_and_its_length():
    """Phi-3's first files call it "su"; transformers takes the length from outside the scaling, by default 4096."""
    for config in ({**PHI4_MINI, "rope_scaling": {**PHI4_MINI["rope_scaling"], "type": "su"}}, PHI4_MINI):
        config = {key: value for key, value in config.items() if key != "original_max_position_embeddings"}
        theirs = Phi3Config.from_dict(dict(config)).rope_parameters
        found = families.for_hf_config(config).args_from_hf(config)
        for key in ("rope_type", "short_factor", "long_factor", "original_max_position_embeddings"):
            assert found["rope_scaling"][key] == theirs[key]
        assert found["rotary_percent"] == theirs["partial_rotary_factor"] == 0.75


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softmax_scale": 0.1234}, "gemma3_text has softmax_scale = 0.1230.*, but the arguments say 0.1234"),
        ({"softmax_scale": None}, "gemma3_text needs --softmax-scale and --window-size"),
        ({"window_size": None}, "gemma3_text needs --softmax-scale and --window-size"),
        ({"window_size": [511, 5]}, r"gemma3_text has window_size = \[511, 0\], but"),
        ({"window_attn_skip_freq": [1] * 25}, "for each of the 26 layers"),
        ({"attn_logit_softcapping": 50.0}, "gemma3_text has attn_logit_softcapping = None"),
        ({"sandwich_norm": False}, "gemma3_text has sandwich_norm = True"),
        ({"swiglu": True}, "gemma3_text has swiglu = False"),
        ({"rotary_interleaved": True}, "gemma3_text has rotary_interleaved = False"),
    ],
)
def test_arguments_outside_gemma3_are_refused(change, message):
    args = Namespace(**{**families.FAMILIES["gemma3_text"].args_from_hf(GEMMA3_1B), **change})
    with pytest.raises(GrpoError, match=message):
        families.for_args(args).hf_from_args(args)


def test_arguments_outside_the_family_are_refused():
    args = Namespace(**families.FAMILIES["qwen3"].args_from_hf(QWEN3_06B))
    args = replaced(args, qk_layernorm=False)
    with pytest.raises(GrpoError, match="qwen3 has qk_layernorm = True"):
        families.for_args(args).hf_from_args(args)
    args = replaced(args, model_family="gpt5")
    with pytest.raises(GrpoError, match=f"'gpt5': give one of {', '.join(families.FAMILIES)}"):
        families.for_args(args)
    args = Namespace(**families.FAMILIES["qwen2"].args_from_hf(QWEN25_05B))
    args = replaced(args, kv_channels=128)
    with pytest.raises(GrpoError, match=r"kv_channels \(128\) times num_attention_heads \(14\)"):
        families.for_args(args).hf_from_args(args)
