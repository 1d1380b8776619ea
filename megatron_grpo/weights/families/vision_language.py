"""What vision-language families have in common: a decoder of a text family and a vision part."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.kinds import KINDS, VISION_KEYS, vision_keys
from megatron_grpo.weights.families.common import Config, Family
from megatron_grpo.weights.parameter_mapping import ParameterMapping


def text_config(config: Config) -> Config:
    """Return config.json with the keys of the language model at its top, where older files have them."""
    return {**config.get("text_config", {}), **{key: value for key, value in config.items() if key != "text_config"}}


def check_keys(config: Config, family: str, needed: Mapping[str, Any]) -> None:
    """Raise GrpoError if config.json has another value of a key ("part.key" is a key in a part). Keys may be absent."""
    for key, value in needed.items():
        part, _, name = key.rpartition(".")
        found = (config.get(part, {}) if part else config).get(name, value)
        if found != value:
            raise GrpoError(f"config.json has {key} {found!r}: family {family} is supported with {value!r} only")


def renamed(mappings: Sequence[ParameterMapping], rename: Callable[[str], str]) -> tuple[ParameterMapping, ...]:
    """Return a table with other Hugging Face names."""

    def apart(hf: Mapping[str, str]) -> dict[str, str]:
        return {rename(name): dims for name, dims in hf.items()}

    return tuple(replace(mapping, hf=apart(mapping.hf)) for mapping in mappings)


def inside(name: str) -> str:
    """Return a decoder's name in files that keep the language model apart: model.language_model.layers."""
    return name.replace("model.", "model.language_model.", 1)


def vision_language(
    name: str,
    architecture: str,
    text: Family,
    mappings: Sequence[ParameterMapping],
    hf_config: Callable[[Config], Config] = dict,
    **defaults: Any,
) -> Family:
    """Return the family with the decoder of ``text`` and the vision part of `KINDS`.

    ``hf_config``, ``defaults``: see `Family`.
    """
    interleaved = KINDS[name].interleaved

    def read_mrope(config: Config) -> dict[str, Any]:
        rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        section = rope.pop("mrope_section", None)
        if not isinstance(section, list) or len(section) != 3:
            raise GrpoError("config.json lacks mrope_section, three numbers of frequencies, in rope_scaling")
        if bool(rope.pop("mrope_interleaved", False)) != interleaved:
            raise GrpoError(f"config.json has mrope_interleaved {not interleaved}: family {name} has {interleaved}")
        if rope.get("type") == "mrope":
            rope.pop("type")
        plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
        found = text.read_rope({**plain, "rope_parameters": rope})
        if found["rope_scaling"]:
            raise GrpoError(
                f"config.json has mrope_section and rope scaling {found['rope_scaling']}, which vLLM and transformers "
                "compute differently (YaRN: vLLM for four times original_max_position_embeddings): remove the scaling "
                "from config.json, and keep rope_theta and mrope_section"
            )
        return {**found, "mrope_section": section}

    def write_mrope(args: Namespace) -> Config:
        keys = text.write_rope(args)
        section: Mapping[str, Any] = {"mrope_section": args.mrope_section}
        section = {**section, "mrope_interleaved": True} if interleaved else {"type": "mrope", **section}
        return {
            **keys,
            "rope_scaling": {"rope_type": "default", **section},
            "rope_parameters": {**keys["rope_parameters"], **section},
        }

    return Family(
        name=name,
        architecture=architecture,
        mappings=tuple(mappings),
        fixed=text.fixed,
        read=lambda config: {**text.read(config), "vision_config": vision_keys(name, config)},
        write=lambda args: {**text.write(args), **args.vision_config},
        read_rope=read_mrope if KINDS[name].mrope else text.read_rope,
        write_rope=write_mrope if KINDS[name].mrope else text.write_rope,
        text_config=text_config,
        hf_config=hf_config,
        defaults=defaults,
    )


def nested(config: Config, text_type: str | None = None) -> Config:
    """Return config.json with the keys of the language model in ``text_config``; ``text_type``: its model_type."""
    top = ["architectures", "model_type", "vision_config", *VISION_KEYS, "tie_word_embeddings"]
    text = {key: value for key, value in config.items() if key not in top}
    text |= {
        "model_type": text_type or f"{config['model_type']}_text",
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    return {**{key: config[key] for key in top if key in config}, "text_config": text}
