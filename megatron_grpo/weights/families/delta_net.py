"""Decoders of gated delta nets and gated attention (Qwen3-Next, Qwen3.5): parameter mappings and arguments."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_grpo.models.config import moe_layers, recurrent_layers
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import quantized
from megatron_grpo.weights.families.common import HF, MCORE, Config, need, refuse_bias, refuse_window
from megatron_grpo.weights.families.qwen3 import HEAD_NORMS
from megatron_grpo.weights.parameter_mapping import ParameterMapping, by_key_heads, fused, gated_qkv

LINEAR, FULL = "linear_attention", "full_attention"


def _linear(args, layer):
    return recurrent_layers(args)[layer]


def _full(args, layer):
    return not recurrent_layers(args)[layer]


_LAYER, _HF = MCORE + "self_attention.", HF + "linear_attn."
_QKV = ("linear_qk", "linear_qk", "linear_v")


def hybrid_attention(in_proj: ParameterMapping) -> tuple[ParameterMapping, ...]:
    """Return the mappings of both kinds of layers; ``in_proj``: that of a delta net's input projection."""
    full = (
        ParameterMapping(
            _LAYER + "linear_qkv.weight",
            {
                HF + "self_attn.q_proj.weight": "two_q hidden",
                HF + "self_attn.k_proj.weight": "kv hidden",
                HF + "self_attn.v_proj.weight": "kv hidden",
            },
            gated_qkv,
            axis=0,
        ),
        *HEAD_NORMS,
        ParameterMapping(_LAYER + "linear_proj.weight", {HF + "self_attn.o_proj.weight": "hidden q"}, axis=1),
    )
    linear = (
        in_proj,
        ParameterMapping(
            _LAYER + "conv1d.weight",
            {_HF + "conv1d.weight": "linear_qkv one linear_width"},
            fused(by_key_heads, *_QKV),
            axis=0,
        ),
        ParameterMapping(_LAYER + "dt_bias", {_HF + "dt_bias": "linear_value_heads"}, axis=0),
        # Published in float32: in 16 bits the decay of a head would change by up to a percent.
        ParameterMapping(_LAYER + "A_log", {_HF + "A_log": "linear_value_heads"}, axis=0, dtype=torch.float32),
        ParameterMapping(_LAYER + "out_norm.weight", {_HF + "norm.weight": "linear_value_head"}),
        ParameterMapping(_LAYER + "out_proj.weight", {_HF + "out_proj.weight": "hidden linear_v"}, axis=1),
    )
    return (*(replace(one, when=_full) for one in full), *(replace(one, when=_linear) for one in linear))


# The fixed arguments of these families.
HYBRID = {
    "qk_layernorm": True,
    "add_qkv_bias": False,
    "multi_latent_attention": False,
    "apply_layernorm_1p": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
}
_SIZES = "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads"
# Keys that vLLM reads, and their only supported values.
_SUPPORTED = {
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),
    "mamba_ssm_dtype": ("float32",),  # of the state
    "layer_scale": (False,),
    "use_sliding_window": (False,),
}
DEFAULTS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
}


MTP_PREFIX = "mtp."
_MTP = MTP_PREFIX + "layers.{mtp}."
# Embedding and output layer are the policy's, without copies in the files.
MTP_MAPPINGS = (
    ParameterMapping(_MTP + "enorm.weight", {"mtp.pre_fc_norm_embedding.weight": "hidden"}),
    ParameterMapping(_MTP + "hnorm.weight", {"mtp.pre_fc_norm_hidden.weight": "hidden"}),
    ParameterMapping(_MTP + "eh_proj.weight", {"mtp.fc.weight": "hidden two_hidden"}, axis=0),
    ParameterMapping(_MTP + "final_layernorm.weight", {"mtp.norm.weight": "hidden"}),
)


def mtp_layer(mappings: Sequence[ParameterMapping]) -> tuple[ParameterMapping, ...]:
    """Return the mappings of the decoder layer in a multi-token-prediction layer, from a table of the whole model."""
    layered = [mapping for mapping in mappings if "{layer}" in mapping.mcore]
    return tuple(replace(one, hf={name.replace(HF, _MTP): shape for name, shape in one.hf.items()}) for one in layered)


def check_mtp(args: Namespace) -> None:
    """Raise GrpoError unless the model has at most one layer of multi-token prediction, with attention and as the last.

    vLLM shares one projection among several of these layers, and decides by its own numbers which have experts.
    """
    if not args.mtp_num_layers:
        return
    if args.mtp_num_layers > 1:
        raise GrpoError(
            f"--mtp-num-layers is {args.mtp_num_layers}: model family {args.model_family} has one such layer: give 1"
        )
    if recurrent_layers(args)[-1] or (args.num_experts and not all(moe_layers(args))):
        raise GrpoError(
            f"--mtp-num-layers with model family {args.model_family} needs a last layer with attention (it has a "
            f"delta net: {recurrent_layers(args)[-1]}), and experts in all layers or in none: leave the flag out"
        )


def text_part(name: str) -> str | None:
    """Return a tensor's name in files of the language model alone; None for vision.

    The names are those of text checkpoints and of vision-language ones.
    """
    if name.startswith("model.visual."):
        return None
    return name.replace("model.language_model.", "model.", 1)


def text_config(config: Config) -> Config:
    """Return the config.json of the language model in a vision-language one."""
    outside = {key: config[key] for key in quantized.CONFIG_KEYS | {"tie_word_embeddings"} if key in config}
    return {**need(config, "text_config"), **outside}


def read_hybrid(config: Config) -> dict[str, Any]:
    """Return the arguments of the layers' pattern and sizes: `layer_types`, or `full_attention_interval`."""
    refuse_bias(config, "attention_bias")
    for key, values in _SUPPORTED.items():
        if config.get(key, values[0]) not in values:
            raise GrpoError(f"config.json has {key} {config[key]!r}: only {values[0]!r} is supported")
    layers, every = need(config, "num_hidden_layers"), config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [LINEAR if layer % every else FULL for layer in range(1, layers + 1)]
    if len(kinds) != layers or not {LINEAR, FULL}.issuperset(kinds):
        raise GrpoError(
            f"config.json has layer_types of {len(kinds)} layers, {', '.join(sorted(set(kinds)))}: give {LINEAR} or "
            f"{FULL} for each of num_hidden_layers {layers}"
        )
    if len(set(kinds)) == 1:  # vLLM ignores the window of a model with layers of two kinds
        refuse_window(config)
    return {
        **{size: need(config, size) for size in _SIZES.split()},
        "kv_channels": need(config, "head_dim"),
        "linear_attention_freq": _frequency([kind == LINEAR for kind in kinds]),
    }


def _frequency(linear: Sequence[bool]) -> int | list[int]:
    """Return --linear-attention-freq in its shortest form."""
    if False in linear:
        every = linear.index(False) + 1
        if all(one == (layer % every != 0) for layer, one in enumerate(linear, start=1)):
            return every
    return [int(one) for one in linear]


def write_hybrid(args: Namespace, mtp: str = "mtp_num_hidden_layers") -> Config:
    """Return the config.json keys that read_hybrid reads, and ``mtp``: the number of multi-token-prediction layers."""
    check_mtp(args)
    kinds = [LINEAR if linear else FULL for linear in recurrent_layers(args)]
    sizes = {size: getattr(args, size) for size in _SIZES.split()}
    hybrid = {"head_dim": args.kv_channels, "attention_bias": False, "layer_types": kinds}
    # vLLM keeps the recurrent state of Qwen3.5 in the dtype of this key, and without it in that of the weights.
    return {**sizes, **hybrid, mtp: args.mtp_num_layers or 0, "mamba_ssm_dtype": "float32"}
