"""Qwen3.5 with experts: the decoder of qwen3_5_moe with interleaved M-RoPE and a vision tower."""

from dataclasses import replace

from megatron_grpo.weights.families import qwen3_5_moe
from megatron_grpo.weights.families.delta_net import MTP_PREFIX
from megatron_grpo.weights.families.vision_language import inside, nested, renamed, text_config, vision_language

FAMILY = replace(
    vision_language(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        qwen3_5_moe.FAMILY,
        renamed(qwen3_5_moe.FAMILY.mappings, inside),
        nested,
        **qwen3_5_moe.FAMILY.defaults,
    ),
    mtp_prefix=MTP_PREFIX,
    text_config=lambda config: qwen3_5_moe.with_width(text_config(config)),
)
