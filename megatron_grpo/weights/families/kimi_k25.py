"""Kimi-K2.5 and K2.6, the language model only: it is read as DeepSeek-V3, which is what exports and the engine have."""

from dataclasses import replace

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import quantized
from megatron_grpo.weights.families import deepseek_v3
from megatron_grpo.weights.families.common import Config

_TEXT, _VISION = "language_model.", ("vision_tower.", "mm_projector.")


def text_config(config: Config) -> Config:
    """Return the config.json of the language model; GrpoError unless it is one of DeepSeek-V3's kind."""
    text = config.get("text_config") or {}
    if text.get("model_type") not in ("kimi_k2", "deepseek_v3"):
        raise GrpoError(
            f"config.json has text_config.model_type {text.get('model_type')!r}: only 'kimi_k2' is supported"
        )
    outside = {key: config[key] for key in quantized.CONFIG_KEYS & config.keys()}
    return {**text, **outside, "tie_word_embeddings": config.get("tie_word_embeddings", False)}


def _published(name: str) -> str | None:
    return None if name.startswith(_VISION) else name.removeprefix(_TEXT)


FAMILY = replace(
    deepseek_v3.FAMILY,
    architecture="KimiK25ForConditionalGeneration",
    text_config=text_config,
    published=_published,
)
