"""InternVL3 in transformers' layout (OpenGVLab/InternVL3-1B-hf): Qwen2.5's decoder and InternViT on tiles of images."""

from dataclasses import replace
from functools import partial

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families import qwen2
from megatron_grpo.weights.families.common import Config
from megatron_grpo.weights.families.vision_language import nested, renamed, text_config, vision_language


def _text_config(config: Config) -> Config:
    """Return config.json with the decoder's keys at its top; GrpoError for a decoder or features of other kinds."""
    needed = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    found = {key: config.get(key, value) for key, value in needed.items()}
    found["text_config.model_type"] = config.get("text_config", {}).get("model_type", "qwen2")
    for key, value in {**needed, "text_config.model_type": "qwen2"}.items():
        if found[key] != value:
            raise GrpoError(f"config.json has {key} {found[key]!r}: family internvl is supported with {value!r} only")
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
)
