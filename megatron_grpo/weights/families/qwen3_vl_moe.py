"""Qwen3-VL with experts: Qwen3-MoE's decoder, whose files hold all experts of a layer in one tensor."""

from dataclasses import replace
from typing import Any

from megatron_grpo.weights.families import qwen3_moe
from megatron_grpo.weights.families.common import HF
from megatron_grpo.weights.families.vision_language import inside, nested, renamed, vision_language
from megatron_grpo.weights.parameter_mapping import fused, stacked

_STACKED: dict[str, dict[str, Any]] = {
    "linear_fc1.weight": {
        "hf": {HF + "mlp.experts.gate_up_proj": "experts hidden two_expert_ffn"},
        "layout": fused(stacked, "expert_ffn", "expert_ffn"),
    },
    "linear_fc2.weight": {"hf": {HF + "mlp.experts.down_proj": "experts expert_ffn hidden"}},
}
MAPPINGS = [
    replace(mapping, **_STACKED[mapping.mcore.rpartition("{expert}.")[2]], all_experts=True, transposed=True)
    if "{expert}" in mapping.mcore
    else mapping
    for mapping in qwen3_moe.MAPPINGS
]

FAMILY = vision_language(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    qwen3_moe.FAMILY,
    renamed(MAPPINGS, inside),
    nested,
    num_key_value_heads=16,
    rope_theta=500000,
)
