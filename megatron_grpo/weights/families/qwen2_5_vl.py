"""Qwen2.5-VL: Qwen2.5's decoder with M-RoPE, and a vision tower (vision/kinds.py)."""

from argparse import Namespace
from typing import Any

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.kinds import vision_keys
from megatron_grpo.weights.families import qwen2
from megatron_grpo.weights.families.common import Config, Family, read_rope, rope_keys


def text_config(config: Config) -> Config:
    """Return config.json with the keys of the language model at its top, as published; transformers 5 nests them."""
    return {**config.get("text_config", {}), **{key: value for key, value in config.items() if key != "text_config"}}


def _read_rope(config: Config) -> dict[str, Any]:
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    section = rope.pop("mrope_section", None)
    if not isinstance(section, list) or len(section) != 3:
        raise GrpoError("config.json lacks mrope_section, three numbers of frequencies, in rope_scaling")
    if rope.get("type") == "mrope":
        rope.pop("type")
    plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
    return {**read_rope({**plain, "rope_parameters": rope}), "mrope_section": section}


def _write_rope(args: Namespace) -> Config:
    keys = rope_keys(args, args.rope_scaling)
    section = {"mrope_section": args.mrope_section}
    return {
        **keys,
        "rope_scaling": {"type": "mrope", "rope_type": "default", **section},
        "rope_parameters": {**keys["rope_parameters"], **section},
    }


def _read(config: Config) -> dict[str, Any]:
    return {**qwen2.FAMILY.read(config), "vision_config": vision_keys(config)}


def _write(args: Namespace) -> Config:
    return {**qwen2.FAMILY.write(args), **args.vision_config}


FAMILY = Family(
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    mappings=qwen2.FAMILY.mappings,
    fixed=qwen2.FAMILY.fixed,
    read=_read,
    write=_write,
    read_rope=_read_rope,
    write_rope=_write_rope,
    text_config=text_config,
)
