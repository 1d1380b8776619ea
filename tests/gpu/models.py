"""Hugging Face directories of small random models in bf16, of shapes that GPU kernels take."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 4096
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 128,
}
OWN = {
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "qwen3_5_text": {**DELTA, "max_position_embeddings": 2048},
    "qwen3_5_moe_text": {
        **DELTA,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "deepseek_v3": {  # latent attention of the sizes of vLLM's kernels
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        **ROUTED,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128},
    "glm4_moe": {
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        **ROUTED,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128, "sliding_window": 16},
    "gemma2": {
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "nemotron_h": {  # each kind of layer; two heads of a state for each group
        "num_hidden_layers": None,
        "max_position_embeddings": 2048,
        "hybrid_override_pattern": "ME*M-E",
        "ssm_state_size": 128,
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "n_groups": 2,
        **ROUTED,
        "moe_shared_expert_intermediate_size": 128,
        "routed_scaling_factor": 2.5,
    },
    "gemma4_text": {  # the last two layers share keys, and full layers have keys for values
        "global_head_dim": 512,
        "head_dim": 256,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "minimax_m2": {
        "rotary_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
    },
    "glm4_moe_lite": {  # latent attention of GLM-4.7-Flash's sizes
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "head_dim": 64,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        **ROUTED,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 0,
    },
}
# Families with larger weights than transformers', so that an error of a layer shows: with a deviation of 0.02 experts
# hardly count beside attention, and all norms would be 1.
EXPERTS = ("qwen3_moe", "deepseek_v3", "mixtral", "minimax_m2", "glm4_moe", "glm4_moe_lite", "gpt_oss")
LOUD = {"nemotron_h", "gemma4_text", *EXPERTS}


def make(directory: Path, family: str, logits: float, **sizes) -> str:
    """Write a random model of ``family`` whose logits have the standard deviation ``logits``; returns ``directory``.

    ``sizes`` replace keys of config.json.

    Logits of published models reach 20 to 30, where bf16 has steps of 0.125. Those of a new model are near 0: rounding
    would not show.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **OWN[family], **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if family in LOUD:
        louder(model)
    with torch.no_grad():  # the last norm makes hidden states of mean square 1
        model.get_output_embeddings().weight.normal_(std=logits / config.hidden_size**0.5)
        for name, weight in model.named_parameters():  # with tied embeddings a token would else foresee itself alone
            if config.tie_word_embeddings and "layernorm" in name and "post_" in name:
                weight.fill_(40.0)
    # transformers would write each expert of Qwen3.5 apart, the published files have them stacked.
    model.save_pretrained(directory, save_original_format=family != "qwen3_5_moe_text")
    return str(directory)


@torch.no_grad()
def louder(model: torch.nn.Module) -> None:
    """Set the weights of a model of `LOUD`; products keep the mean square, those of experts a quarter of it.

    Where rounding chooses another expert, the difference is then that of a few layers' rounding.
    """
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("e_score_correction_bias", "conv1d.bias")):
            weight.normal_(std=0.1)
        elif "norm" in name or name.endswith(("layer_scalar", ".D")):
            # Gemma 4 does not divide the products of queries and keys by the size of a head.
            is_small = model.config.model_type == "gemma4_text" and name.endswith(("q_norm.weight", "k_norm.weight"))
            mean = 0.25 if is_small else 0.7
            weight.normal_(mean=mean, std=0.2 * mean)
        elif weight.dim() > 1 and "embed" not in name:
            part = 0.5 if name.endswith("experts.down_proj") else 1.0
            weight.normal_(std=part * weight.shape[-1] ** -0.5)
