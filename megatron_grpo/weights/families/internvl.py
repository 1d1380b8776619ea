"""InternVL3 in transformers' layout (OpenGVLab/InternVL3-1B-hf): Qwen2.5's decoder and InternViT on tiles of images."""

from dataclasses import replace
from functools import partial

from megatron_grpo.weights.families import qwen2
from megatron_grpo.weights.families.common import Config
from megatron_grpo.weights.families.vision_language import (
    check_keys,
    nested,
    renamed,
    text_config,
    vision_language,
)


def _text_config(config: Config) -> Config:
    """Return config.json with the decoder's keys at its top; GrpoError for a decoder or features of other kinds."""
    features = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    check_keys(config, "internvl", {**features, "text_config.model_type": "qwen2"})
    return text_config(config)


FAMILY = replace(
    vision_language(
        "internvl",
        "InternVLForConditionalGeneration",
        qwen2.FAMILY,
        renamed(qwen2.FAMILY.mappings, lambda name: f"language_model.{name}"),
        partial(nested, text_type="qwen2"),
    ),
    text_config=_text_config,
    defaults={**qwen2.FAMILY.defaults, "downsample_ratio": 0.5},
)
