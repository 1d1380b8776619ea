"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts with a gated shared one."""

from argparse import Namespace
from typing import Any

from megatron_grpo.weights.families import qwen3_moe
from megatron_grpo.weights.families.common import (
    COMMON,
    HF,
    MCORE,
    Config,
    Family,
    decoder_mappings,
    read_partial_rope,
    write_partial_rope,
)
from megatron_grpo.weights.families.delta_net import (
    DEFAULTS,
    HYBRID,
    MTP_MAPPINGS,
    MTP_PREFIX,
    hybrid_attention,
    mtp_layer,
    read_hybrid,
    text_part,
    write_hybrid,
)
from megatron_grpo.weights.families.moe import MLP, SOFTMAX_ROUTER, with_gated_shared_expert
from megatron_grpo.weights.parameter_mapping import ParameterMapping, by_key_heads

_IN_PROJ = ParameterMapping(
    MCORE + "self_attention.in_proj.weight",
    {
        HF + "linear_attn.in_proj_qkvz.weight": "linear_qkvz hidden",  # by key heads, as is the second
        HF + "linear_attn.in_proj_ba.weight": "linear_two_value_heads hidden",
    },
    by_key_heads,
    axis=0,
)
# Fixed arguments of the experts, and defaults of their keys.
EXPERTS = {
    **{key: value for key, value in SOFTMAX_ROUTER.items() if key != "moe_shared_expert_intermediate_size"},
    "moe_shared_expert_gate": True,
}
EXPERT_DEFAULTS = {"norm_topk_prob": True, "shared_expert_intermediate_size": 512}


def read_experts(config: Config) -> dict[str, Any]:
    """Return the arguments of Qwen3-MoE's experts and of a shared one."""
    return {
        **qwen3_moe.FAMILY.read(config),
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
    }


def write_experts(args: Namespace) -> Config:
    """Return the config.json keys that read_experts reads."""
    written = qwen3_moe.FAMILY.write(args)
    names = "moe_intermediate_size num_experts_per_tok num_experts norm_topk_prob decoder_sparse_step mlp_only_layers"
    return {
        **{name: written[name] for name in names.split()},
        "shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
    }


_MAPPINGS = decoder_mappings(hybrid_attention(_IN_PROJ), with_gated_shared_expert(MLP))
FAMILY = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    mappings=_MAPPINGS,
    mtp_mappings=MTP_MAPPINGS,
    mtp_prefix=MTP_PREFIX,
    mtp_layer=mtp_layer(_MAPPINGS),
    fixed={**COMMON, **HYBRID, **EXPERTS},
    read=lambda config: {**read_experts(config), **read_hybrid(config)},
    # vLLM's key: the published config.json has none.
    write=lambda args: {**write_experts(args), **write_hybrid(args, mtp="num_nextn_predict_layers")},
    read_rope=read_partial_rope,
    write_rope=write_partial_rope,
    published=text_part,
    defaults={**DEFAULTS, **EXPERT_DEFAULTS, "num_key_value_heads": 2},
)
