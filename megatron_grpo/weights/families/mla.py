"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): parameter mappings, arguments, rotary embedding."""

from argparse import Namespace
from typing import Any

from megatron_grpo.models.rope import check_scaling
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import (
    HF,
    MCORE,
    Config,
    need,
    refuse_bias,
    refuse_window,
    rope_keys,
    rope_of,
)
from megatron_grpo.weights.parameter_mapping import ParameterMapping


def set_latent_epsilon(model: Any, config: Any) -> None:
    """Give the norms of latents in transformers' model config.json's epsilon, which vLLM gives them.

    transformers has 1e-6 for them whatever config.json says; GLM-4.7-Flash and Kimi-K2.5 say 1e-5.
    """
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = config.rms_norm_eps


def _latent_queries(args, layer):
    return args.q_lora_rank is not None


def _full_queries(args, layer):
    return args.q_lora_rank is None


_ATTENTION, _HF = MCORE + "self_attention.", HF + "self_attn."
# Every tensor-parallel rank has the full down projections to the latents. The rotated channels are interleaved in
# megatron-core (multi_latent_attention) and in transformers (rope_interleave), so no permutation is needed.
ATTENTION = (
    ParameterMapping(
        _ATTENTION + "linear_q_proj.weight", {_HF + "q_proj.weight": "latent_q hidden"}, axis=0, when=_full_queries
    ),
    ParameterMapping(
        _ATTENTION + "linear_q_down_proj.weight",
        {_HF + "q_a_proj.weight": "q_latent hidden"},
        when=_latent_queries,
    ),
    ParameterMapping(
        _ATTENTION + "q_layernorm.weight", {_HF + "q_a_layernorm.weight": "q_latent"}, when=_latent_queries
    ),
    ParameterMapping(
        _ATTENTION + "linear_q_up_proj.weight",
        {_HF + "q_b_proj.weight": "latent_q q_latent"},
        axis=0,
        when=_latent_queries,
    ),
    ParameterMapping(
        _ATTENTION + "linear_kv_down_proj.weight", {_HF + "kv_a_proj_with_mqa.weight": "kv_latent_and_rope hidden"}
    ),
    ParameterMapping(_ATTENTION + "kv_layernorm.weight", {_HF + "kv_a_layernorm.weight": "kv_latent"}),
    ParameterMapping(
        _ATTENTION + "linear_kv_up_proj.weight", {_HF + "kv_b_proj.weight": "latent_kv kv_latent"}, axis=0
    ),
    ParameterMapping(_ATTENTION + "linear_proj.weight", {_HF + "o_proj.weight": "hidden latent_out"}, axis=1),
)

FIXED = {"multi_latent_attention": True, "qk_layernorm": True, "add_qkv_bias": False, "group_query_attention": False}


def read_mla(config: Config) -> dict[str, Any]:
    """Return the arguments of the attention layers."""
    refuse_bias(config, "attention_bias")
    refuse_window(config)
    heads = need(config, "num_attention_heads")
    if (config.get("num_key_value_heads") or heads) != heads:
        raise GrpoError(
            f"config.json has num_key_value_heads {config['num_key_value_heads']} and num_attention_heads {heads}: "
            f"with latent attention they must be equal"
        )
    return {
        "group_query_attention": False,
        "num_query_groups": None,
        "kv_channels": need(config, "v_head_dim"),
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": need(config, "kv_lora_rank"),
        "qk_head_dim": need(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": need(config, "qk_rope_head_dim"),
        "v_head_dim": need(config, "v_head_dim"),
    }


def write_mla(args: Namespace) -> Config:
    """Return the config.json keys that read_mla reads."""
    return {
        "attention_bias": False,
        "q_lora_rank": args.q_lora_rank,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_head_dim,
        "qk_rope_head_dim": args.qk_pos_emb_head_dim,
        "v_head_dim": args.v_head_dim,
    }


def read_mla_rope(config: Config) -> dict[str, Any]:
    """Return the arguments of the rotary embedding: unscaled, or YaRN (arXiv:2309.00071) with DeepSeek's scaling."""
    theta, _, rope = rope_of(config)
    if rope is None:
        return {"rotary_base": theta, "rope_type": "rope", "mscale_all_dim": 0.0}
    kind = rope["rope_type"]
    if kind != "yarn":
        raise GrpoError(f"config.json has rope scaling of type {kind!r}: only 'default' and 'yarn' are supported")
    if rope.get("attention_factor") is not None or rope.get("truncate") is False:
        raise GrpoError(
            "config.json has yarn rope scaling with attention_factor or with truncate false, which is not supported: "
            "Megatron-Core computes the factor from mscale and mscale_all_dim, and truncates"
        )
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if not (mscale and all_dim):
        if all_dim or mscale not in (None, 1):
            raise GrpoError(
                f"config.json has yarn rope scaling with mscale {mscale} and mscale_all_dim {all_dim}, which "
                f"transformers and vLLM interpret differently: give both, or neither"
            )
        mscale, all_dim = 1.0, 0.0
    plain = {name: value for name, value in rope.items() if name not in ("mscale", "mscale_all_dim")}
    check_scaling(plain, need(config, "max_position_embeddings"))  # vLLM reads more parameters
    return {
        "rotary_base": theta,
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }


def write_mla_rope(args: Namespace) -> Config:
    """Return the keys that read_mla_rope reads; DeepSeek's code reads `type`, transformers reads `rope_type`."""
    if args.rope_type == "rope":
        return rope_keys(args, None)
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": args.rotary_scaling_factor,
        "original_max_position_embeddings": args.original_max_position_embeddings,
        "beta_fast": args.beta_fast,
        "beta_slow": args.beta_slow,
    }
    if args.mscale_all_dim:
        scaling |= {"mscale": args.mscale, "mscale_all_dim": args.mscale_all_dim}
    return rope_keys(args, scaling)
