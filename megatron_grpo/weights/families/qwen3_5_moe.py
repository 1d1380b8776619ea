"""Qwen3.5 with experts, text only: the decoder of Qwen3.5, the experts of Qwen3-Next."""

from megatron_grpo.weights.families.common import COMMON, Config, Family, decoder_mappings, write_partial_rope
from megatron_grpo.weights.families.delta_net import DEFAULTS, HYBRID, read_hybrid, write_hybrid
from megatron_grpo.weights.families.moe import MLP, with_gated_shared_expert
from megatron_grpo.weights.families.qwen3_5 import ATTENTION, read_text_rope
from megatron_grpo.weights.families.qwen3_next import EXPERT_DEFAULTS, EXPERTS, read_experts, write_experts


def _with_width(config: Config) -> Config:
    """Return config.json with the width of dense layers, which it leaves out: there are none."""
    return {"intermediate_size": config.get("moe_intermediate_size"), **config}


FAMILY = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    mappings=decoder_mappings(ATTENTION, with_gated_shared_expert(MLP)),
    fixed={**COMMON, **HYBRID, **EXPERTS},
    read=lambda config: {**read_experts(config), **read_hybrid(config)},
    write=lambda args: {**write_experts(args), **write_hybrid(args)},
    read_rope=read_text_rope,
    write_rope=write_partial_rope,
    text_config=_with_width,
    defaults={**DEFAULTS, **EXPERT_DEFAULTS, "num_key_value_heads": 2},
)
