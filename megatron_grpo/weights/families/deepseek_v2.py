"""DeepSeek-V2-Lite and models with its architecture: latent attention, softmax router, shared experts.

Source: arXiv:2405.04434.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_grpo.models.config import moe_layers
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import COMMON, Config, Family, decoder_mappings, need
from megatron_grpo.weights.families.mla import ATTENTION, FIXED, read_mla, read_mla_rope, write_mla, write_mla_rope
from megatron_grpo.weights.families.moe import MLP, read_moe, write_moe

# Supported values of keys of DeepSeek's own code. Not group_limited_greedy: Megatron-Core scores groups in another way.
_SUPPORTED = {"scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 1, "norm_topk_prob": False}


def read_deepseek_moe(config: Config, supported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of routed and shared experts; the first layers are dense.

    `supported`: config.json key -> the only supported value.
    """
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise GrpoError(f"config.json has {key} {config[key]}: only {value} is supported")
    layers, first = need(config, "num_hidden_layers"), config.get("first_k_dense_replace") or 0
    moe = read_moe(config, [layer >= first for layer in range(layers)])
    return {
        **moe,
        "num_experts": need(config, "n_routed_experts"),
        "moe_router_topk_scaling_factor": need(config, "routed_scaling_factor"),
        "moe_shared_expert_intermediate_size": (config.get("n_shared_experts") or 0) * moe["moe_ffn_hidden_size"]
        or None,
    }


def write_deepseek_moe(args: Namespace) -> Config:
    """Return the config.json keys that read_deepseek_moe reads, except those of `supported`."""
    sparse = moe_layers(args)
    first, shared = sparse.index(True), args.moe_shared_expert_intermediate_size or 0
    if not all(sparse[first:]):
        raise GrpoError(
            f"model family {args.model_family} has all dense layers before the expert layers, but moe_layer_freq is "
            f"{args.moe_layer_freq}"
        )
    if shared % args.moe_ffn_hidden_size:
        raise GrpoError(
            f"moe_shared_expert_intermediate_size ({shared}) is not a multiple of moe_ffn_hidden_size "
            f"({args.moe_ffn_hidden_size}): {args.model_family} has shared experts of a routed expert's size"
        )
    return {
        **write_moe(args),
        "n_routed_experts": args.num_experts,
        "n_shared_experts": shared // args.moe_ffn_hidden_size,
        "routed_scaling_factor": args.moe_router_topk_scaling_factor or 1.0,
        "first_k_dense_replace": first,
    }


def _read(config):
    return {**read_mla(config), **read_deepseek_moe(config, _SUPPORTED)}


def _write(args):
    return {**write_mla(args), **write_deepseek_moe(args), **_SUPPORTED, "n_group": 1, "topk_group": 1}


FAMILY = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    mappings=decoder_mappings(ATTENTION, MLP),
    fixed={
        **COMMON,
        **FIXED,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": False,
        "moe_router_group_topk": None,
    },
    read=_read,
    write=_write,
    read_rope=read_mla_rope,
    write_rope=write_mla_rope,
    defaults={"n_shared_experts": 2, "q_lora_rank": 1536},
)
