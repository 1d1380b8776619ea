"""Flags and rules of model families: the arguments that describe a model, and the settings that no family supports."""

import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_grpo.models.arguments import MODEL, Only, check_only
from megatron_grpo.utils.core_flags import core_flags
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import FlagRow
from megatron_grpo.utils.json_files import read_config
from megatron_grpo.utils.rules import flag
from megatron_grpo.vision.kinds import KINDS
from megatron_grpo.weights import families
from megatron_grpo.weights.families.common import ABSENT

MODEL_FAMILY: FlagRow = (
    "--model-family",
    tuple(families.FAMILIES),
    None,
    "model family: its parameter mappings and its config.json keys [the one of --load-hf]",
)

# Arguments that describe a model's architecture. A checkpoint's stored arguments and a translated config.json contain
# them.
ARCHITECTURE = (
    "model_family num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups "
    "kv_channels qk_layernorm add_qkv_bias add_bias_linear normalization norm_epsilon swiglu position_embedding_type "
    "rotary_base max_position_embeddings vocab_size "
    "untie_embeddings_and_output_weights num_experts moe_ffn_hidden_size moe_layer_freq moe_router_topk "
    "moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups "
    "moe_router_group_topk moe_router_enable_expert_bias moe_shared_expert_intermediate_size "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
    "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim mtp_num_layers"
).split() + [*ABSENT]

_FAMILIES = "the supported model families (" + ", ".join(families.FAMILIES) + ")"

# As in models/arguments.py: (attributes, values, reason and cure).
ONLY: tuple[Only, ...] = (
    ("normalization", ("RMSNorm",), f"{_FAMILIES} use RMSNorm: give --normalization RMSNorm"),
    (
        "no_rope_freq qk_l2_norm moe_latent_size apply_residual_connection_post_layernorm",
        (None, False),
        f"{_FAMILIES} do not have this feature, so the engine could not run the model: leave the flag out",
    ),
)


def check_architecture(args: Namespace) -> None:
    """Raise GrpoError for an architecture that its family does not support."""
    families.for_args(args).hf_from_args(args)


def check_family(args: Namespace) -> None:
    """Raise GrpoError for a setting that no model family supports, and for a vision family without its tower."""
    check_only(args, ONLY)
    if args.model_family in KINDS and not args.vision_config:
        raise GrpoError(
            f"--model-family {args.model_family} needs the vision tower of a config.json: give --load-hf, "
            "or --vision-config"
        )


def default_architecture() -> dict[str, Any]:
    """Return the default of every argument in ARCHITECTURE."""
    ours = {name[2:].replace("-", "_"): default for name, _, default, *_ in (MODEL_FAMILY, *MODEL)}
    cores = core_flags()
    return {dest: cores[dest].default if dest in cores else ours[dest] for dest in ARCHITECTURE}


def resolve_architecture(args: Namespace, source: Mapping[str, Any], source_name: str) -> dict[str, Any]:
    """Return the model's architecture, from a checkpoint's stored arguments or a config.json translated to arguments.

    Raises GrpoError, which names the flag, both values and the source, when a flag that was given differs.
    """
    found = {}
    for dest in ARCHITECTURE:
        if dest not in source:
            continue
        value = source[dest]
        given = getattr(args, dest) if dest in args.explicit else None
        if value is None and not given:
            continue
        # Some converters write numbers of 32 bits: 9.999999974752427e-07 is 1e-6.
        near = isinstance(given, float) and isinstance(value, float) and math.isclose(given, value, rel_tol=1e-6)
        if given is not None and given != value and not near:
            raise GrpoError(
                f"{flag(dest)} is {given}, but {source_name} says {value}: leave the flag out, or load "
                "weights of that architecture"
            )
        found[dest] = value
    return found


def architecture_of(args: Namespace, directory: str, name: str | None = None) -> dict[str, Any]:
    """Return the architecture in the ``config.json`` of a directory; GrpoError when a flag that was given differs.

    ``name``: of the family, if the directory can be read as several; that of --model-family by default.
    """
    config = read_config(directory)
    if name is None and "model_family" in args.explicit:
        name = args.model_family
    family = families.for_hf_config(config, name)
    return resolve_architecture(args, family.args_from_hf(config), f"{directory}/config.json")
