"""Qwen3 (dense): RMSNorm on each query and key head, no biases, head size from config.json."""

from megatron_grpo.weights.families.common import DENSE, HF, MCORE, Family, dense_mappings, refuse_bias
from megatron_grpo.weights.families.qwen2 import read_qwen_window, write_qwen_window
from megatron_grpo.weights.parameter_mapping import ParameterMapping

HEAD_NORMS = (
    ParameterMapping(MCORE + "self_attention.q_layernorm.weight", {HF + "self_attn.q_norm.weight": "head"}),
    ParameterMapping(MCORE + "self_attention.k_layernorm.weight", {HF + "self_attn.k_norm.weight": "head"}),
)


def _read(config):
    refuse_bias(config, "attention_bias")
    return {**read_qwen_window(config), "kv_channels": config.get("head_dim") or 128}  # 128: transformers' default


def _write(args):
    return {**write_qwen_window(args), "head_dim": args.kv_channels, "attention_bias": False}


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    mappings=dense_mappings(*HEAD_NORMS),
    fixed={**DENSE, "qk_layernorm": True, "add_qkv_bias": False},
    read=_read,
    write=_write,
    defaults={"num_key_value_heads": 32},
)
