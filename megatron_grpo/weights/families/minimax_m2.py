"""MiniMax-M2, M2.1, M2.5 and M2.7: norms of the queries and keys of all heads together, sigmoid router with biases.

The published files hold no multi-token-prediction layers, although config.json has `use_mtp`.
"""

import torch

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import (
    COMMON,
    HF,
    MCORE,
    Family,
    decoder_mappings,
    grouped_attention,
    head_dim,
    read_partial_rope,
    refuse_bias,
    refuse_window,
    write_partial_rope,
)
from megatron_grpo.weights.families.deepseek_v3 import SIGMOID_ROUTER
from megatron_grpo.weights.families.moe import read_uniform_moe, routed_experts, write_uniform_moe
from megatron_grpo.weights.parameter_mapping import ParameterMapping

# Every tensor-parallel rank has the weights of all heads.
_NORMS = (
    ParameterMapping(MCORE + "self_attention.q_layernorm.weight", {HF + "self_attn.q_norm.weight": "q"}),
    ParameterMapping(MCORE + "self_attention.k_layernorm.weight", {HF + "self_attn.k_norm.weight": "kv"}),
)
_EXPERTS = (
    *routed_experts("block_sparse_moe", "w1", "w3", "w2"),
    ParameterMapping(
        MCORE + "mlp.router.expert_bias",
        {HF + "block_sparse_moe.e_score_correction_bias": "experts"},
        dtype=torch.float32,
    ),
)
# vLLM reads the first two; transformers has these values built in.
_SUPPORTED = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,  # vLLM's model has an output layer of its own
}


def _read(config):
    refuse_bias(config, "attention_bias")
    refuse_window(config)
    for key, value in _SUPPORTED.items():
        if config.get(key, value) != value:
            raise GrpoError(f"config.json has {key} {config[key]!r}: only {value!r} is supported")
    if set(config.get("attn_type_list") or [1]) != {1}:
        raise GrpoError("config.json has attn_type_list with other values than 1: only full attention is supported")
    found = read_uniform_moe(config)
    if found["moe_router_topk"] == 1:
        raise GrpoError(
            "config.json has num_experts_per_tok 1: Megatron-Core does not normalise a single expert's weight to 1"
        )
    return {**found, "kv_channels": head_dim(config)}


def _write(args):
    return {
        **write_uniform_moe(args),
        **_SUPPORTED,
        "head_dim": args.kv_channels,
        "use_mtp": False,
        "num_mtp_modules": 0,
    }


def _read_rope(config):
    """Return the arguments of the rotary embedding; as in transformers, `rotary_dim` counts if there is no factor."""
    channels = config.get("rotary_dim")
    part = {} if channels is None else {"partial_rotary_factor": channels / head_dim(config)}
    return read_partial_rope({**part, **config})


def _write_rope(args):
    return {**write_partial_rope(args), "rotary_dim": int(args.kv_channels * args.rotary_percent)}


FAMILY = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    mappings=decoder_mappings(grouped_attention(*_NORMS), _EXPERTS),
    fixed={
        **COMMON,
        **SIGMOID_ROUTER,
        "multi_latent_attention": False,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "add_qkv_bias": False,
        "moe_layer_freq": 1,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
        "moe_shared_expert_intermediate_size": None,
    },
    read=_read,
    write=_write,
    read_rope=_read_rope,
    write_rope=_write_rope,
    defaults={"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5000000},
)
