"""Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano: layers of one branch each: Mamba-2, attention, an MLP or experts.

Sources: arXiv:2504.03624, arXiv:2508.14444. Attention has no position embedding; MLPs and experts have no gate, and
square their ReLU.
"""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch

from megatron_grpo.models.config import ATTENTION, EXPERTS, MAMBA, MAMBA_CONVOLUTION, MLP
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import COMMON, MCORE, Config, Family, grouped_attention, need, refuse_bias
from megatron_grpo.weights.families.deepseek_v3 import read_groups
from megatron_grpo.weights.parameter_mapping import ParameterMapping, by_key_heads, fused, vocabulary

_LAYER = "backbone.layers.{layer}."
_MIXER = _LAYER + "mixer."
_BRANCH = MCORE + "self_attention."
# Names of `layers_block_type` -> letters of `hybrid_override_pattern`; the last two are earlier names.
_KINDS = {
    "linear_attention": MAMBA,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
    "mamba": MAMBA,
    "attention": ATTENTION,
}


def _of(kind: str, *mappings: ParameterMapping) -> tuple[ParameterMapping, ...]:
    """Return the mappings for the layers of a kind."""
    return tuple(replace(one, when=lambda args, layer: args.hybrid_layer_pattern[layer] == kind) for one in mappings)


_NORM = {_LAYER + "norm.weight": "hidden"}
_MAMBA_LAYER = (
    ParameterMapping(MCORE + "input_layernorm.weight", _NORM),
    ParameterMapping(
        _BRANCH + "in_proj.weight",
        {_MIXER + "in_proj.weight": "linear_projected hidden"},
        fused(by_key_heads, "linear_v", "linear_v", "linear_qk", "linear_qk", "linear_value_heads"),
        axis=0,
    ),
    *(
        ParameterMapping(
            _BRANCH + f"conv1d.{part}",
            {_MIXER + f"conv1d.{part}": shape},
            fused(by_key_heads, "linear_v", "linear_qk", "linear_qk"),
            axis=0,
        )
        for part, shape in (("weight", "linear_qkv one linear_width"), ("bias", "linear_qkv"))
    ),
    ParameterMapping(_BRANCH + "dt_bias", {_MIXER + "dt_bias": "linear_value_heads"}, axis=0),
    # The engine has it in float32, and the dtype of its weights for the others.
    ParameterMapping(_BRANCH + "A_log", {_MIXER + "A_log": "linear_value_heads"}, axis=0, dtype=torch.float32),
    ParameterMapping(_BRANCH + "D", {_MIXER + "D": "linear_value_heads"}, axis=0),
    ParameterMapping(_BRANCH + "out_norm.weight", {_MIXER + "norm.weight": "linear_v"}, axis=0),
    ParameterMapping(_BRANCH + "out_proj.weight", {_MIXER + "out_proj.weight": "hidden linear_v"}, axis=1),
)
_ATTENTION_LAYER = (
    ParameterMapping(MCORE + "input_layernorm.weight", _NORM),
    *grouped_attention(hf=_MIXER),
)
_MLP_LAYER = (
    ParameterMapping(MCORE + "pre_mlp_layernorm.weight", _NORM),
    ParameterMapping(MCORE + "mlp.linear_fc1.weight", {_MIXER + "up_proj.weight": "ffn hidden"}, axis=0),
    ParameterMapping(MCORE + "mlp.linear_fc2.weight", {_MIXER + "down_proj.weight": "hidden ffn"}, axis=1),
)
_EXPERT, _SHARED = MCORE + "mlp.experts.local_experts.{expert}.", MCORE + "mlp.shared_experts."
_EXPERTS_LAYER = (
    ParameterMapping(MCORE + "pre_mlp_layernorm.weight", _NORM),
    ParameterMapping(MCORE + "mlp.router.weight", {_MIXER + "gate.weight": "experts hidden"}),
    ParameterMapping(
        MCORE + "mlp.router.expert_bias",
        {_MIXER + "gate.e_score_correction_bias": "experts"},
        dtype=torch.float32,
    ),
    ParameterMapping(
        _EXPERT + "linear_fc1.weight", {_MIXER + "experts.{expert}.up_proj.weight": "expert_ffn hidden"}, axis=0
    ),
    ParameterMapping(
        _EXPERT + "linear_fc2.weight", {_MIXER + "experts.{expert}.down_proj.weight": "hidden expert_ffn"}, axis=1
    ),
    ParameterMapping(
        _SHARED + "linear_fc1.weight", {_MIXER + "shared_experts.up_proj.weight": "shared_ffn hidden"}, axis=0
    ),
    ParameterMapping(
        _SHARED + "linear_fc2.weight", {_MIXER + "shared_experts.down_proj.weight": "hidden shared_ffn"}, axis=1
    ),
)
_SIZES = {
    "mamba_state_dim": "ssm_state_size",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_num_groups": "n_groups",
    "mamba_num_heads": "mamba_num_heads",
}
# Keys with one supported value: transformers and vLLM ignore the first, and have no tied output layer.
_SUPPORTED = {
    "residual_in_fp32": False,
    "tie_word_embeddings": False,
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "conv_kernel": MAMBA_CONVOLUTION,
    "sliding_window": None,
}
_SUPPORTED_WITH_EXPERTS = {"norm_topk_prob": True, "n_shared_experts": 1, "moe_latent_size": None}
_BIASES = "attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"


def _pattern(config: Config) -> str:
    """Return the letters of the layers: `hybrid_override_pattern`, or `layers_block_type` of transformers 5."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern") or "".join(_KINDS.get(kind, "?") for kind in kinds or ())
    if not pattern or not set(_KINDS.values()).issuperset(pattern):
        raise GrpoError(
            f"config.json has the layers {kinds or pattern!r}: only Mamba-2 (M), attention (*), MLPs (-) and experts "
            "(E) are supported"
        )
    return pattern


def _read(config: Config) -> dict[str, Any]:
    pattern = _pattern(config)
    for key, value in (_SUPPORTED | (_SUPPORTED_WITH_EXPERTS if EXPERTS in pattern else {})).items():
        if config.get(key, value) != value:
            raise GrpoError(f"config.json has {key} {config[key]!r}: only {value!r} is supported")
    if config.get("attention_head_dim", config["head_dim"]) != config["head_dim"]:  # an earlier name, ignored by both
        raise GrpoError(f"config.json has attention_head_dim {config['attention_head_dim']}: name it head_dim")
    refuse_bias(config, *_BIASES)
    return {
        **{dest: need(config, key) for dest, key in _SIZES.items()},
        "kv_channels": need(config, "head_dim"),
        "hybrid_layer_pattern": pattern,
        **(_read_experts(config, pattern) if EXPERTS in pattern else {"num_experts": None}),
    }


def _read_experts(config: Config, pattern: str) -> dict[str, Any]:
    topk = need(config, "num_experts_per_tok")
    return {
        "num_experts": need(config, "n_routed_experts"),
        "moe_ffn_hidden_size": need(config, "moe_intermediate_size"),
        "moe_layer_freq": [int(kind == EXPERTS) for kind in pattern],
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": need(config, "routed_scaling_factor"),
        "moe_shared_expert_intermediate_size": need(config, "moe_shared_expert_intermediate_size"),
        **read_groups(config, topk),
    }


def _write_experts(args: Namespace) -> Config:
    return {
        "n_routed_experts": args.num_experts,
        "moe_intermediate_size": args.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
        "num_experts_per_tok": args.moe_router_topk,
        "routed_scaling_factor": args.moe_router_topk_scaling_factor or 1.0,
        "n_group": args.moe_router_num_groups or 1,
        "topk_group": args.moe_router_group_topk or 1,
        **_SUPPORTED_WITH_EXPERTS,
    }


def _write(args: Namespace) -> Config:
    return {
        **(_write_experts(args) if args.num_experts else {}),
        **_SUPPORTED,
        **dict.fromkeys(_BIASES, False),
        **{key: getattr(args, dest) for dest, key in _SIZES.items()},
        "head_dim": args.kv_channels,
        "hybrid_override_pattern": args.hybrid_layer_pattern,
        "layer_norm_epsilon": args.norm_epsilon,
        "mamba_ssm_cache_dtype": "float32",  # vLLM's of the states
    }


def _text_config(config: Config) -> Config:
    """Return a config.json with this project's usual keys of the number of layers and of the norms' epsilon.

    transformers and vLLM count the pattern's layers, and do not read rms_norm_eps.
    """
    usual = {"rms_norm_eps": config.get("layer_norm_epsilon", 1e-5), "num_hidden_layers": len(_pattern(config))}
    return {**config, **usual}


FAMILY = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    mappings=(
        ParameterMapping(
            "embedding.word_embeddings.weight", {"backbone.embeddings.weight": "vocab hidden"}, vocabulary, axis=0
        ),
        *_of(MAMBA, *_MAMBA_LAYER),
        *_of(ATTENTION, *_ATTENTION_LAYER),
        *_of(MLP, *_MLP_LAYER),
        *_of(EXPERTS, *_EXPERTS_LAYER),
        ParameterMapping("decoder.final_layernorm.weight", {"backbone.norm_f.weight": "hidden"}),
        ParameterMapping("output_layer.weight", {"lm_head.weight": "vocab hidden"}, vocabulary, axis=0),
    ),
    fixed={
        **COMMON,
        "swiglu": False,
        "squared_relu": True,
        "position_embedding_type": "none",
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "multi_latent_attention": False,
    },
    read=_read,
    write=_write,
    read_rope=lambda config: {},
    write_rope=lambda args: {},
    activation=("mlp_hidden_act", "relu2"),
    published=lambda name: None if name.startswith("mtp.") else name,
    text_config=_text_config,
    defaults={
        "head_dim": 128,
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "mlp_hidden_act": "relu2",
        "n_groups": 8,
        "num_key_value_heads": 8,
        "ssm_state_size": 128,
    },
)
