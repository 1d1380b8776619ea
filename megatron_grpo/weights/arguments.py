"""Flags and rules of model families: what describes a model, where that comes from, and what no family has."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_grpo.models.arguments import MODEL, Only, check_only
from megatron_grpo.utils.arguments import FlagRow
from megatron_grpo.utils.core_flags import core_flags
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.rules import flag
from megatron_grpo.weights import families
from megatron_grpo.weights.families.common import ABSENT

MODEL_FAMILY: FlagRow = (
    "--model-family",
    tuple(families.FAMILIES),
    None,
    "names and layout of the weights [--load-hf's]",
)

# What describes a model; a checkpoint's stored arguments and a translated config.json both have these.
ARCHITECTURE = (
    "model_family num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups "
    "kv_channels qk_layernorm add_qkv_bias add_bias_linear normalization norm_epsilon swiglu position_embedding_type "
    "rotary_base max_position_embeddings vocab_size "
    "untie_embeddings_and_output_weights num_experts moe_ffn_hidden_size moe_layer_freq moe_router_topk "
    "moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups "
    "moe_router_group_topk moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
    "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim mtp_num_layers"
).split() + [*ABSENT]

_FAMILIES = "the model families here (" + ", ".join(families.FAMILIES) + ")"

# As in models/arguments.py: (attributes, values, reason and cure).
ONLY: tuple[Only, ...] = (
    ("normalization", ("RMSNorm",), f"{_FAMILIES} have RMSNorm: give --normalization RMSNorm"),
    (
        "no_rope_freq qk_l2_norm attention_output_gate moe_latent_size apply_residual_connection_post_layernorm",
        (None, False),
        f"{_FAMILIES} have no such thing, so the engine could not run the model: leave it out",
    ),
)


def check_family(args: Namespace) -> None:
    """Refuse what no model family here has."""
    check_only(args, ONLY)


def default_architecture() -> dict[str, Any]:
    """The attributes that describe a model, as they are when no flag says anything."""
    ours = {name[2:].replace("-", "_"): default for name, _, default, *_ in (MODEL_FAMILY, *MODEL)}
    cores = core_flags()
    return {dest: cores[dest].default if dest in cores else ours[dest] for dest in ARCHITECTURE}


def merge_architecture(args: Namespace, source: Mapping[str, Any], source_name: str) -> None:
    """Take the model's shape from a checkpoint's stored arguments or from a config.json translated to arguments.

    A flag that was given must agree: else GrpoError names the flag, both values and the source.
    """
    for dest in ARCHITECTURE:
        if dest not in source:
            continue
        value = source[dest]
        given = getattr(args, dest) if dest in args.explicit else None
        if value is None and not given:
            continue
        if given is not None and given != value:
            raise GrpoError(
                f"{flag(dest)} is {given}, but {source_name} says {value}: leave the flag out, or load "
                "the weights that it describes"
            )
        setattr(args, dest, value)
