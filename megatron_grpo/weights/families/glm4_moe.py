"""GLM-4.5 and 4.6, also Air (arXiv:2508.06471).

Grouped-query attention with partial rotation of each head; experts and multi-token prediction as in DeepSeek-V3.
"""

from dataclasses import replace

from megatron_grpo.weights.families.common import (
    COMMON,
    QKV_BIAS,
    Family,
    decoder_mappings,
    grouped_attention,
    head_dim,
    read_partial_rope,
    refuse_window,
    write_partial_rope,
)
from megatron_grpo.weights.families.deepseek_v3 import (
    MTP_MAPPINGS,
    SIGMOID_ROUTER,
    read_sigmoid_moe,
    write_sigmoid_moe,
)
from megatron_grpo.weights.families.moe import MLP
from megatron_grpo.weights.families.qwen3 import HEAD_NORMS


def _normed(args, layer):
    return args.qk_layernorm


_ATTENTION = grouped_attention(QKV_BIAS, *(replace(mapping, when=_normed) for mapping in HEAD_NORMS))
_SUPPORTED = {"norm_topk_prob": True}


def _read(config):
    refuse_window(config)
    return {
        **read_sigmoid_moe(config, _SUPPORTED),
        "kv_channels": head_dim(config),
        "add_qkv_bias": bool(config.get("attention_bias")),
        "qk_layernorm": bool(config.get("use_qk_norm")),
    }


def _write(args):
    return {
        **write_sigmoid_moe(args),
        **_SUPPORTED,
        "head_dim": args.kv_channels,
        "attention_bias": args.add_qkv_bias,
        "use_qk_norm": args.qk_layernorm,
    }


FAMILY = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    mappings=decoder_mappings(_ATTENTION, MLP),
    fixed={**COMMON, **SIGMOID_ROUTER, "multi_latent_attention": False},
    read=_read,
    write=_write,
    read_rope=read_partial_rope,
    write_rope=write_partial_rope,
    mtp_mappings=MTP_MAPPINGS,
    defaults={
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
    },
)
