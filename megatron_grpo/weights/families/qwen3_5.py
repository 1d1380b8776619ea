"""Qwen3.5 (dense), the language model: gated delta nets, gated attention in every fourth layer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_grpo.weights.families.common import (
    DENSE,
    DENSE_MLP,
    HF,
    MCORE,
    Config,
    Family,
    decoder_mappings,
    read_partial_rope,
    write_partial_rope,
)
from megatron_grpo.weights.families.delta_net import (
    DEFAULTS,
    HYBRID,
    MTP_MAPPINGS,
    MTP_PREFIX,
    hybrid_attention,
    mtp_layer,
    read_hybrid,
    text_config,
    text_part,
    write_hybrid,
)
from megatron_grpo.weights.parameter_mapping import ParameterMapping, Slice


def _in_proj_layout(lines: Sequence[int], tp_size: int, dims: Mapping[str, int]) -> list[Slice]:
    """Return the layout of in_proj: for each key head its query, key and values, their gates z, and b and a."""
    heads = dims["linear_key_heads"]
    key, value, scalars = (dims[name] // heads for name in ("linear_qk", "linear_v", "linear_value_heads"))
    found = []
    for head in range(heads):
        start = 0
        for size in (key, key, value):  # one tensor has all queries, all keys and all values
            found.append(Slice(0, start + head * size, start + (head + 1) * size))
            start += heads * size
        for source, size in ((1, value), (2, scalars), (3, scalars)):
            found.append(Slice(source, head * size, (head + 1) * size))
    return found


_HF = HF + "linear_attn."
ATTENTION = hybrid_attention(
    ParameterMapping(
        MCORE + "self_attention.in_proj.weight",
        {
            _HF + "in_proj_qkv.weight": "linear_qkv hidden",
            _HF + "in_proj_z.weight": "linear_v hidden",
            _HF + "in_proj_b.weight": "linear_value_heads hidden",
            _HF + "in_proj_a.weight": "linear_value_heads hidden",
        },
        _in_proj_layout,
        axis=0,
    )
)


def read_text_rope(config: Config) -> Config:
    """Return the arguments of the rotary embedding; the three axes of M-RoPE have equal positions in texts."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
    of_text = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return read_partial_rope({**plain, "rope_parameters": of_text})


_MAPPINGS = decoder_mappings(ATTENTION, DENSE_MLP)
FAMILY = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    mappings=_MAPPINGS,
    mtp_mappings=MTP_MAPPINGS,
    mtp_prefix=MTP_PREFIX,
    mtp_layer=mtp_layer(_MAPPINGS),
    fixed={**DENSE, **HYBRID},
    read=read_hybrid,
    write=write_hybrid,
    read_rope=read_text_rope,
    write_rope=write_partial_rope,
    published=text_part,
    defaults={**DEFAULTS, "num_key_value_heads": 4},
)
# The language model alone of a published checkpoint.
TEXT_PART = replace(FAMILY, architecture="Qwen3_5ForConditionalGeneration", text_config=text_config)
