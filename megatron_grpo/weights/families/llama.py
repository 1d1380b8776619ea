"""Llama 2, 3, 3.1, 3.2, 3.3 (dense): separate query, key and value, no biases, Llama 3.1's rope scaling."""

from megatron_grpo.weights.families.common import DENSE, Family, dense_mappings, head_dim, refuse_bias, refuse_window

MAPPINGS = dense_mappings()


def _read(config):
    refuse_bias(config, "attention_bias", "mlp_bias")
    refuse_window(config)
    return {"kv_channels": head_dim(config)}


def _write(args):
    return {"head_dim": args.kv_channels, "attention_bias": False, "mlp_bias": False}


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    mappings=MAPPINGS,
    fixed={**DENSE, "qk_layernorm": False, "add_qkv_bias": False},
    read=_read,
    write=_write,
)
