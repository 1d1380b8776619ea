"""Qwen3-VL (dense): Qwen3's decoder with interleaved M-RoPE; the tower's inner features enter its first layers."""

from megatron_grpo.weights.families import qwen3
from megatron_grpo.weights.families.vision_language import inside, nested, renamed, vision_language

FAMILY = vision_language(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    qwen3.FAMILY,
    renamed(qwen3.FAMILY.mappings, inside),
    nested,
    num_key_value_heads=32,
    rope_theta=500000,
)
