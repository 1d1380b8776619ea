"""LLaVA-OneVision (llava-hf/llava-onevision-qwen2-0.5b-ov-hf): Qwen2's decoder and SigLIP on tiles of images."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families import qwen2
from megatron_grpo.weights.families.common import Config
from megatron_grpo.weights.families.vision_language import (
    check_keys,
    nested,
    renamed,
    text_config,
    vision_language,
)

# The only values that the family is supported with; the last key is that of the tower's pooling head.
_NEEDED: dict[str, Any] = {
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_9",
    "text_config.model_type": "qwen2",
    "vision_config.model_type": "siglip_vision_model",
    "vision_config.vision_use_head": False,
}
# Keys of the decoder that published files leave out.
_DEFAULTS = {**qwen2.FAMILY.defaults, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}


def _text_config(config: Config) -> Config:
    """Return config.json with the decoder's keys at its top; GrpoError for a decoder or features of other kinds."""
    check_keys(config, "llava_onevision", _NEEDED)
    # Published files have the key of the decoder's embeddings in its part, and transformers reads both.
    decoder = config.get("text_config", {})
    tied = decoder.get("tie_word_embeddings", False) or config.get("tie_word_embeddings", False)
    if not isinstance(config.get("image_grid_pinpoints"), list):
        raise GrpoError("config.json lacks image_grid_pinpoints, the sizes to which images are scaled")
    return {**text_config(config), "tie_word_embeddings": tied}


FAMILY = replace(
    vision_language(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        qwen2.FAMILY,
        renamed(qwen2.FAMILY.mappings, lambda name: f"language_model.{name}"),
        partial(nested, text_type="qwen2"),
    ),
    text_config=_text_config,
    defaults=_DEFAULTS,
    # transformers 5 leaves vision_model out.
    published=lambda name: re.sub(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", name),
)
