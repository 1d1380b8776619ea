"""Qwen2 and Qwen2.5 (dense): bias on query, key and value, none elsewhere."""

from megatron_grpo.errors import GrpoError
from megatron_grpo.weights.families.common import (
    DENSE,
    QKV_BIAS,
    Family,
    dense_rows,
    head_dim,
    refuse_sliding_window,
)

ROWS = dense_rows(QKV_BIAS)


def _read(config):
    refuse_sliding_window(config)
    return {"kv_channels": head_dim(config)}


def _write(args):
    if args.kv_channels * args.num_attention_heads != args.hidden_size:
        raise GrpoError(
            f"model family qwen2 has heads of hidden_size / num_attention_heads channels: kv_channels "
            f"({args.kv_channels}) times num_attention_heads ({args.num_attention_heads}) is not hidden_size "
            f"({args.hidden_size})"
        )
    return {"use_sliding_window": False, "sliding_window": None}


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    rows=ROWS,
    fixed={**DENSE, "qk_layernorm": False, "add_qkv_bias": True},
    read=_read,
    write=_write,
)
