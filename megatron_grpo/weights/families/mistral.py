"""Mistral (dense): Llama with a sliding window in all layers or in none (arXiv:2310.06825)."""

from megatron_grpo.weights.families.common import DENSE, Family, dense_mappings, head_dim, refuse_bias
from megatron_grpo.weights.families.windows import read_window, write_window


def _read(config):
    refuse_bias(config, "attention_bias", "mlp_bias")
    return {**read_window(config, default=4096), "kv_channels": head_dim(config)}  # 4096: transformers' default


def _write(args):
    return {**write_window(args), "head_dim": args.kv_channels}


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    mappings=dense_mappings(),
    fixed={**DENSE, "qk_layernorm": False, "add_qkv_bias": False},
    read=_read,
    write=_write,
    defaults={"num_key_value_heads": 8},
)
