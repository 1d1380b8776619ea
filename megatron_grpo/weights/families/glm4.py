"""GLM-4 of 2025 (Glm4ForCausalLM): norms before and after attention and MLP; half of each head is rotated, in pairs."""

from megatron_grpo.weights.families.common import (
    DENSE,
    FUSED_MLP,
    QKV_BIAS,
    Family,
    decoder_mappings,
    grouped_attention,
    head_dim,
    read_partial_rope,
    refuse_window,
    sandwich_norms,
    write_partial_rope,
)

ATTENTION = grouped_attention(QKV_BIAS)
POST_ATTENTION, POST_MLP = sandwich_norms("post_self_attn_layernorm", "post_mlp_layernorm")
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}
FIXED = {**DENSE, "qk_layernorm": False, "rotary_interleaved": True}


def read(config):
    refuse_window(config)
    return {"kv_channels": head_dim(config), "add_qkv_bias": bool(config.get("attention_bias", True))}


def write(args):
    return {"head_dim": args.kv_channels, "attention_bias": args.add_qkv_bias}


FAMILY = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    mappings=decoder_mappings((*ATTENTION, POST_ATTENTION), (*FUSED_MLP, POST_MLP)),
    fixed={**FIXED, "sandwich_norm": True},
    read=read,
    write=write,
    read_rope=read_partial_rope,
    write_rope=write_partial_rope,
    defaults=DEFAULTS,
)
