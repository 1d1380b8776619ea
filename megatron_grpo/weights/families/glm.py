"""GLM-4 of 2024 (GlmForCausalLM): as Glm4ForCausalLM, without the norms after attention and MLP."""

from megatron_grpo.weights.families import glm4
from megatron_grpo.weights.families.common import (
    FUSED_MLP,
    Family,
    decoder_mappings,
    read_partial_rope,
    write_partial_rope,
)

FAMILY = Family(
    name="glm",
    architecture="GlmForCausalLM",
    mappings=decoder_mappings(glm4.ATTENTION, FUSED_MLP),
    fixed=glm4.FIXED,
    read=glm4.read,
    write=glm4.write,
    read_rope=read_partial_rope,
    write_rope=write_partial_rope,
    defaults=glm4.DEFAULTS,
)
