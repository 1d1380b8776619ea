"""Supported model families. To add a family, write a module like qwen3.py and add it to FAMILIES."""

from argparse import Namespace

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    internvl,
    kimi_k25,
    llama,
    llava_onevision,
    minimax_m2,
    mistral,
    mixtral,
    nemotron_h,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_vision,
    qwen3_5_vision,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
)
from megatron_grpo.weights.families.common import Config, Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        llama,
        mistral,
        phi3,
        qwen2,
        qwen2_5_vl,
        qwen3,
        qwen3_moe,
        qwen3_next,
        qwen3_5,
        qwen3_5_moe,
        qwen3_5_vision,
        qwen3_5_moe_vision,
        qwen3_vl,
        qwen3_vl_moe,
        mixtral,
        minimax_m2,
        nemotron_h,
        glm,
        glm4,
        glm4_moe,
        glm4_moe_lite,
        deepseek_v2,
        deepseek_v3,
        gemma2,
        gemma3,
        gemma4,
        gpt_oss,
        internvl,
        llava_onevision,
    )
}

_SPARSE = (
    "an indexer chooses the tokens to which each token attends; docs/sparse_attention.md says what training it needs. "
    "Related families that train: deepseek_v3, glm4_moe"
)
_LIGHTNING = (
    "most layers have lightning attention, which needs a recurrence over packs with a fixed decay for each head, as in "
    "the last paragraph of docs/sparse_attention.md. A related family: qwen3_moe"
)
# Architectures that users ask for -> why they are refused.
REFUSED = {
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "MiniMaxForCausalLM": _LIGHTNING,
    "MiniMaxM1ForCausalLM": _LIGHTNING,
    "MiniMaxText01ForCausalLM": _LIGHTNING,
    "BailingMoeV2_5ForCausalLM": _LIGHTNING,
}

# Directories that are read as one of these families, and exported as one.
READ_AS = (gemma4.TEXT_PART, kimi_k25.FAMILY, qwen3_5.TEXT_PART, qwen3_5_moe.TEXT_PART)


def for_hf_config(config: Config, name: str | None = None) -> Family:
    """Return the family of a config.json by `architectures`, else by `model_type`; raise GrpoError if unknown.

    ``name``: of the family, where the directory can be read as several: of Qwen3.5 the language model alone, too.
    """
    names = config.get("architectures") or []
    found = [
        family
        for family in (*FAMILIES.values(), *READ_AS)
        if family.architecture in names or (not names and config.get("model_type") == family.name)
    ]
    if found:
        return next((family for family in found if family.name == name), found[0])
    unknown = ", ".join(names) or f"model_type {config.get('model_type')!r}"
    reason = next((REFUSED[name] for name in names if name in REFUSED), None)
    if reason:
        raise GrpoError(f"config.json names the architecture {unknown}, which is not supported: {reason}")
    supported = ", ".join(family.architecture for family in (*FAMILIES.values(), *READ_AS))
    raise GrpoError(f"config.json names the architecture {unknown}, which is not supported; supported are: {supported}")


def for_args(args: Namespace) -> Family:
    """Return the family named by --model-family or by the checkpoint's arguments; raise GrpoError if unknown."""
    if args.model_family not in FAMILIES:
        raise GrpoError(f"--model-family is {args.model_family!r}: give one of {', '.join(FAMILIES)}, or --load-hf DIR")
    return FAMILIES[args.model_family]
