"""DeepSeek-V2-Lite and its kin: latent attention, a softmax router, shared experts (arXiv:2405.04434)."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_grpo.models.config import moe_layers
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import COMMON, Config, Family, decoder_rows, need
from megatron_grpo.weights.families.mla import ATTENTION, FIXED, read_mla, read_mla_rope, write_mla, write_mla_rope
from megatron_grpo.weights.families.moe import MLP, read_moe, write_moe

# Keys of DeepSeek's own code; Megatron-Core scores groups by another rule than group_limited_greedy.
_ONLY = {"scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 1, "norm_topk_prob": False}


def read_deepseek_moe(config: Config, only: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of routed and shared experts in all layers but the first ones; `only`: keys of config.json with the one
    value that is supported.
    """
    for key, value in only.items():
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
    """The keys that read_deepseek_moe reads, but for `only`."""
    sparse = moe_layers(args)
    first, shared = sparse.index(True), args.moe_shared_expert_intermediate_size or 0
    if not all(sparse[first:]):
        raise GrpoError(
            f"model family {args.model_family} has its dense layers before all others: not moe_layer_freq "
            f"{args.moe_layer_freq}"
        )
    if shared % args.moe_ffn_hidden_size:
        raise GrpoError(
            f"moe_shared_expert_intermediate_size ({shared}) is no multiple of moe_ffn_hidden_size "
            f"({args.moe_ffn_hidden_size}): model family {args.model_family} has shared experts of an expert's size"
        )
    return {
        **write_moe(args),
        "n_routed_experts": args.num_experts,
        "n_shared_experts": shared // args.moe_ffn_hidden_size,
        "routed_scaling_factor": args.moe_router_topk_scaling_factor or 1.0,
        "first_k_dense_replace": first,
    }


def _read(config):
    return {**read_mla(config), **read_deepseek_moe(config, _ONLY)}


def _write(args):
    return {**write_mla(args), **write_deepseek_moe(args), **_ONLY, "n_group": 1, "topk_group": 1}


FAMILY = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    rows=decoder_rows(ATTENTION, MLP),
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
)
