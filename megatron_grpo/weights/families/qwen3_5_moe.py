"""Qwen3.5 with experts, the language model: Qwen3.5's decoder, Qwen3-Next's experts, all of a layer in one tensor."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import COMMON, HF, Config, Family, decoder_mappings, write_partial_rope
from megatron_grpo.weights.families.delta_net import (
    DEFAULTS,
    HYBRID,
    MTP_MAPPINGS,
    MTP_PREFIX,
    mtp_layer,
    read_hybrid,
    text_config,
    text_part,
    write_hybrid,
)
from megatron_grpo.weights.families.moe import MLP, with_gated_shared_expert
from megatron_grpo.weights.families.qwen3_5 import ATTENTION, read_text_rope
from megatron_grpo.weights.families.qwen3_next import EXPERT_DEFAULTS, EXPERTS, read_experts, write_experts
from megatron_grpo.weights.parameter_mapping import fused, stacked

_STACKED: dict[str, dict[str, Any]] = {
    "linear_fc1.weight": {
        "hf": {HF + "mlp.experts.gate_up_proj": "experts two_expert_ffn hidden"},
        "layout": fused(stacked, "expert_ffn", "expert_ffn"),
    },
    "linear_fc2.weight": {"hf": {HF + "mlp.experts.down_proj": "experts hidden expert_ffn"}},
}
_EXPERT_BY_EXPERT = with_gated_shared_expert(MLP)
_MLP = [
    replace(mapping, **_STACKED[mapping.mcore.rpartition("{expert}.")[2]], all_experts=True)
    if "{expert}" in mapping.mcore
    else mapping
    for mapping in _EXPERT_BY_EXPERT
]


# Qwen3.5-35B-A3B's files have the experts of multi-token prediction one by one, Qwen3.6-35B-A3B's all in one tensor.
_MTP_EXPERTS = "mtp.layers.0.mlp.experts."


def with_width(config: Config) -> Config:
    """Return config.json with the width of dense layers, which it leaves out: there are none."""
    return {"intermediate_size": config.get("moe_intermediate_size"), **config}


def _read(config: Config) -> dict[str, Any]:
    if config.get("mlp_only_layers") or not config["norm_topk_prob"]:
        raise GrpoError(
            f"config.json has mlp_only_layers {config.get('mlp_only_layers')} and norm_topk_prob "
            f"{config['norm_topk_prob']}: every layer of Qwen3.5 has experts, whose weights are normalised"
        )
    return {**read_experts(config), **read_hybrid(config)}


def _write(args: Namespace) -> Config:
    written = {**write_experts(args), **write_hybrid(args)}
    return {key: value for key, value in written.items() if key not in ("norm_topk_prob", "decoder_sparse_step")}


FAMILY = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    mappings=decoder_mappings(ATTENTION, _MLP),
    mtp_mappings=MTP_MAPPINGS,
    mtp_prefix=MTP_PREFIX,
    mtp_layer=mtp_layer(decoder_mappings(ATTENTION, _EXPERT_BY_EXPERT)),
    stacked={
        _MTP_EXPERTS + "gate_up_proj": [f"{_MTP_EXPERTS}{{expert}}.{part}_proj.weight" for part in ("gate", "up")],
        _MTP_EXPERTS + "down_proj": [_MTP_EXPERTS + "{expert}.down_proj.weight"],
    },
    fixed={**COMMON, **HYBRID, **EXPERTS, "moe_layer_freq": 1, "moe_router_pre_softmax": False},
    read=_read,
    write=_write,
    read_rope=read_text_rope,
    write_rope=write_partial_rope,
    published=text_part,
    text_config=with_width,
    defaults={**DEFAULTS, **EXPERT_DEFAULTS, "num_key_value_heads": 2},
)
# The language model alone of a published checkpoint.
TEXT_PART = replace(
    FAMILY,
    architecture="Qwen3_5MoeForConditionalGeneration",
    text_config=lambda config: with_width(text_config(config)),
)
