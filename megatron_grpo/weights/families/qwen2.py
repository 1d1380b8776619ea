"""Qwen2 and Qwen2.5 (dense): biases on query, key and value only."""

from argparse import Namespace
from typing import Any

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import (
    DENSE,
    QKV_BIAS,
    Config,
    Family,
    dense_mappings,
    head_dim,
    refuse_head_dim,
)
from megatron_grpo.weights.families.windows import read_windows, write_window

MAPPINGS = dense_mappings(QKV_BIAS)


def read_qwen_window(config: Config) -> dict[str, Any]:
    """Return the arguments of `use_sliding_window`, `sliding_window` and `max_window_layers`."""
    if not config.get("use_sliding_window"):
        return {}
    first = config.get("max_window_layers", 28)  # default in transformers, as is the size below
    found = read_windows({"sliding_window": 4096, **config}, lambda layer: layer >= first)
    if found["window_attn_skip_freq"] is not None:
        raise GrpoError(
            f"config.json has sliding_window {config.get('sliding_window')} in some layers only, which vLLM does not "
            f"support; set use_sliding_window to false to train with full attention"
        )
    return found


def write_qwen_window(args: Namespace) -> Config:
    """Return the config.json keys that read_qwen_window reads."""
    windowed = bool(args.window_size)
    return {
        **write_window(args),
        "use_sliding_window": windowed,
        "max_window_layers": 0 if windowed else args.num_layers,
    }


def _read(config):
    if config.get("qk_norm"):
        raise GrpoError("config.json has qk_norm, which vLLM reads and transformers ignores for Qwen2: remove it")
    return {**read_qwen_window(config), "kv_channels": head_dim(config)}


def _write(args):
    refuse_head_dim(args)
    return write_qwen_window(args)


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    mappings=dense_mappings(QKV_BIAS),
    fixed={**DENSE, "qk_layernorm": False, "add_qkv_bias": True},
    read=_read,
    write=_write,
    defaults={"num_key_value_heads": 32},
)
