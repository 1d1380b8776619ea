"""Qwen2.5-VL: Qwen2.5's decoder with M-RoPE and a vision tower."""

from megatron_grpo.weights.families import qwen2
from megatron_grpo.weights.families.vision_language import vision_language

FAMILY = vision_language(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    qwen2.FAMILY,
    qwen2.FAMILY.mappings,
    max_window_layers=80,
    num_key_value_heads=8,
    rope_theta=1000000,
)
