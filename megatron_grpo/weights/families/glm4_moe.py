"""GLM-4.5 and 4.6, also Air (arXiv:2508.06471): grouped-query attention with a part of each head rotated, DeepSeek-V3's
experts and multi-token prediction.
"""

from dataclasses import replace

from megatron_grpo.weights.families.common import (
    COMMON,
    QKV_BIAS,
    Family,
    decoder_rows,
    grouped_attention,
    head_dim,
    read_partial_rope,
    write_partial_rope,
)
from megatron_grpo.weights.families.deepseek_v3 import (
    MTP_ROWS,
    SIGMOID_ROUTER,
    read_sigmoid_moe,
    write_sigmoid_moe,
)
from megatron_grpo.weights.families.moe import MLP
from megatron_grpo.weights.families.qwen3 import HEAD_NORMS


def _normed(args, layer):
    return args.qk_layernorm


_ATTENTION = grouped_attention(QKV_BIAS, *(replace(row, when=_normed) for row in HEAD_NORMS))
_ONLY = {"norm_topk_prob": True}


def _read(config):
    return {
        **read_sigmoid_moe(config, _ONLY),
        "kv_channels": head_dim(config),
        "add_qkv_bias": bool(config.get("attention_bias")),
        "qk_layernorm": bool(config.get("use_qk_norm")),
    }


def _write(args):
    return {
        **write_sigmoid_moe(args),
        **_ONLY,
        "head_dim": args.kv_channels,
        "attention_bias": args.add_qkv_bias,
        "use_qk_norm": args.qk_layernorm,
    }


def _read_rope(config):
    return read_partial_rope({"partial_rotary_factor": 0.5, **config})  # transformers' default


FAMILY = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    rows=decoder_rows(_ATTENTION, MLP),
    fixed={**COMMON, **SIGMOID_ROUTER, "multi_latent_attention": False},
    read=_read,
    write=_write,
    read_rope=_read_rope,
    write_rope=write_partial_rope,
    mtp_rows=MTP_ROWS,
)
