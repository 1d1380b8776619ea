"""Qwen3.5 (dense): the decoder of gated delta nets with interleaved M-RoPE and a vision tower."""

from dataclasses import replace

from megatron_grpo.weights.families import qwen3_5
from megatron_grpo.weights.families.delta_net import MTP_PREFIX
from megatron_grpo.weights.families.vision_language import inside, nested, renamed, vision_language

FAMILY = replace(
    vision_language(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        qwen3_5.FAMILY,
        renamed(qwen3_5.FAMILY.mappings, inside),
        nested,
        **qwen3_5.FAMILY.defaults,
    ),
    mtp_prefix=MTP_PREFIX,
)
