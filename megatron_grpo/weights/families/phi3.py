"""Phi-3, Phi-3.5 and Phi-4, also mini (dense): fused projections, partial rotation of each head, LongRoPE.

Sources: arXiv:2404.14219, arXiv:2402.13753.
"""

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import (
    DENSE,
    FUSED_MLP,
    HF,
    MCORE,
    Family,
    decoder_mappings,
    head_dim,
    read_partial_rope,
    refuse_bias,
    refuse_head_dim,
    write_partial_rope,
)
from megatron_grpo.weights.families.windows import read_window, write_window
from megatron_grpo.weights.parameter_mapping import ParameterMapping, fused, grouped_qkv

_ATTENTION = (
    ParameterMapping(
        MCORE + "self_attention.linear_qkv.weight",
        {HF + "self_attn.qkv_proj.weight": "qkv hidden"},
        fused(grouped_qkv, "q", "kv", "kv"),
        axis=0,
    ),
    ParameterMapping(MCORE + "self_attention.linear_proj.weight", {HF + "self_attn.o_proj.weight": "hidden q"}, axis=1),
)


def _read(config):
    refuse_bias(config, "attention_bias", "mlp_bias", "lm_head_bias")
    return {**read_window(config), "kv_channels": head_dim(config)}


def _write(args):
    refuse_head_dim(args)
    return write_window(args)


def _read_rope(config):
    # transformers reads the original length from the top level of config.json, with default 4096.
    found = read_partial_rope({"original_max_position_embeddings": 4096, **_renamed(config)})
    if found["rope_scaling"] and found["rope_scaling"]["rope_type"] != "longrope":
        raise GrpoError(
            f"config.json has rope scaling {found['rope_scaling']}: only type 'longrope' is supported for Phi-3"
        )
    return found


def _renamed(config):
    """Return the configuration with LongRoPE's current name; early Phi-3 files have "su" or, wrongly, "yarn"."""
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    return {**config, "rope_scaling": {**scaling, "rope_type": "longrope"}} if kind in ("su", "yarn") else config


def _write_rope(args):
    keys, scaling = write_partial_rope(args), args.rope_scaling or {}
    return keys | {key: value for key, value in scaling.items() if key == "original_max_position_embeddings"}


FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    mappings=decoder_mappings(_ATTENTION, FUSED_MLP),
    fixed={**DENSE, "qk_layernorm": False, "add_qkv_bias": False},
    read=_read,
    write=_write,
    read_rope=_read_rope,
    write_rope=_write_rope,
)
