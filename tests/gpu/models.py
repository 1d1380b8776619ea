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
OWN = {
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
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
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "gemma2": {
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}


def make(directory: Path, family: str, logits: float) -> str:
    """Write a random model of ``family`` whose logits have the standard deviation ``logits``; returns ``directory``.

    Logits of published models reach 20 to 30, where bf16 has steps of 0.125. Those of a new model are near 0: rounding
    would not show.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **OWN[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():  # the last norm makes hidden states of mean square 1
        model.get_output_embeddings().weight.normal_(std=logits / config.hidden_size**0.5)
        for name, weight in model.named_parameters():  # with tied embeddings a token would else foresee itself alone
            if config.tie_word_embeddings and "layernorm" in name and "post_" in name:
                weight.fill_(40.0)
    model.save_pretrained(directory)
    return str(directory)
