"""Gemma 4, language model only: layers with and without a window of other head sizes, shared keys, layer embeddings."""

from dataclasses import replace
from typing import Any

from megatron_grpo.models.gemma4 import layer_kinds
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import quantized
from megatron_grpo.weights.families.common import (
    COMMON,
    HF,
    MCORE,
    Config,
    Family,
    decoder_mappings,
    need,
    read_rope,
    refuse_bias,
    sandwich_norms,
)
from megatron_grpo.weights.families.gemma2 import ACTIVATION
from megatron_grpo.weights.families.moe import SOFTMAX_ROUTER
from megatron_grpo.weights.families.windows import FULL, SLIDING, read_windows, write_windows
from megatron_grpo.weights.parameter_mapping import ParameterMapping, fused, grouped_by, same, stacked, vocabulary

_LAYER, _HF = MCORE + "self_attention.", HF + "self_attn."


def _when(**kind):
    """Return the condition of layers whose kind has these values."""

    def holds(args, layer):
        own = layer_kinds(args)[layer]
        return all(getattr(own, name) == value for name, value in kind.items())

    return holds


def _attention(windowed):
    """Return the mappings of layers with or without a window, which have other sizes."""
    prefix = "" if windowed else "global_"
    sizes = {"q": f"{prefix}q hidden", "k": f"{prefix}kv hidden", "v": f"{prefix}kv hidden"}

    def projection(parts, layout, **kind):
        tensors = {f"{_HF}{part}_proj.weight": sizes[part] for part in parts}
        when = _when(windowed=windowed, **kind)
        return ParameterMapping(_LAYER + "linear_qkv.weight", tensors, layout, axis=0, when=when)

    def norm(part, **kind):
        shape = {f"{_HF}{part}_norm.weight": f"{prefix}head"}
        return ParameterMapping(_LAYER + f"{part}_layernorm.weight", shape, when=_when(windowed=windowed, **kind))

    groups = grouped_by(f"{prefix}groups")
    return (
        projection("qkv", groups, has_values=True),
        projection("qk", groups, has_keys=True, has_values=False),
        projection("q", same, has_keys=False),
        norm("q"),
        norm("k", has_keys=True),
        ParameterMapping(
            _LAYER + "linear_proj.weight",
            {_HF + "o_proj.weight": f"hidden {prefix}q"},
            axis=1,
            when=_when(windowed=windowed),
        ),
    )


def _has_experts(args, layer):
    return bool(args.num_experts)


def _has_none(args, layer):
    return not args.num_experts


_EXPERT = MCORE + "mlp.experts.local_experts.{expert}."
_EXPERTS = (
    *(
        ParameterMapping(MCORE + f"mlp.{ours}", {HF + theirs: shape}, when=_has_experts)
        for ours, theirs, shape in (
            ("pre_dense_layernorm.weight", "pre_feedforward_layernorm.weight", "hidden"),
            ("post_dense_layernorm.weight", "post_feedforward_layernorm_1.weight", "hidden"),
            ("pre_experts_layernorm.weight", "pre_feedforward_layernorm_2.weight", "hidden"),
            ("post_experts_layernorm.weight", "post_feedforward_layernorm_2.weight", "hidden"),
            ("post_layernorm.weight", "post_feedforward_layernorm.weight", "hidden"),
            ("router_scale", "router.scale", "hidden"),
            ("expert_scale", "router.per_expert_scale", "experts"),
            ("router.weight", "router.proj.weight", "experts hidden"),
        )
    ),
    ParameterMapping(
        _EXPERT + "linear_fc1.weight",
        {HF + "experts.gate_up_proj": "experts two_expert_ffn hidden"},
        fused(stacked, "expert_ffn", "expert_ffn"),
        axis=0,
        when=_has_experts,
        all_experts=True,
    ),
    ParameterMapping(
        _EXPERT + "linear_fc2.weight",
        {HF + "experts.down_proj": "experts hidden expert_ffn"},
        axis=1,
        when=_has_experts,
        all_experts=True,
    ),
)


def _mlp(module, exists):
    """Return the mappings of the MLP in models for which ``exists`` holds; some layers' are twice as wide."""

    def rows(size, double):
        def when(args, layer):
            return exists(args, layer) and (layer_kinds(args)[layer].ffn > args.ffn_hidden_size) == double

        gate_and_up = {HF + f"mlp.{part}_proj.weight": f"{size} hidden" for part in ("gate", "up")}
        down = {HF + "mlp.down_proj.weight": f"hidden {size}"}
        return (
            ParameterMapping(MCORE + f"{module}.linear_fc1.weight", gate_and_up, stacked, axis=0, when=when),
            ParameterMapping(MCORE + f"{module}.linear_fc2.weight", down, axis=1, when=when),
        )

    return (*rows("ffn", double=False), *rows("double_ffn", double=True))


def _has_inputs(args, layer):
    return args.gemma4_config["hidden_size_per_layer_input"] > 0


_INPUTS = (
    ParameterMapping(
        "per_layer_inputs.embedding.weight",
        {"model.embed_tokens_per_layer.weight": "vocab all_layers"},
        vocabulary,
        axis=0,
        when=_has_inputs,
    ),
    ParameterMapping(
        "per_layer_inputs.projection.weight",
        {"model.per_layer_model_projection.weight": "all_layers hidden"},
        when=_has_inputs,
    ),
    ParameterMapping(
        "per_layer_inputs.norm.weight", {"model.per_layer_projection_norm.weight": "per_layer"}, when=_has_inputs
    ),
)
_OWN = (
    *(
        ParameterMapping(MCORE + f"{name}.weight", {HF + f"{name}.weight": shape}, when=_has_inputs)
        for name, shape in (
            ("per_layer_input_gate", "per_layer hidden"),
            ("per_layer_projection", "hidden per_layer"),
            ("post_per_layer_input_norm", "hidden"),
        )
    ),
    ParameterMapping(MCORE + "layer_scalar", {HF + "layer_scalar": "one"}),
)


def _mappings():
    post_attention, post_mlp = sandwich_norms("post_attention_layernorm", "post_feedforward_layernorm")
    attention = (*_attention(windowed=True), *_attention(windowed=False), post_attention)
    mlp = (*_mlp("mlp", _has_none), post_mlp, *_mlp("mlp.dense", _has_experts), *_EXPERTS, *_OWN)
    embedding, *others = decoder_mappings(attention, mlp, "pre_feedforward_layernorm")
    of_dense = (MCORE + "pre_mlp_layernorm.weight", post_mlp.mcore)
    others = [replace(one, when=_has_none) if one.mcore in of_dense else one for one in others]
    return (embedding, *_INPUTS, *others)


# Keys of config.json in --gemma4-config -> transformers' defaults.
_DEFAULTS = {
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 256,
}


def _read(config):
    refuse_bias(config, "attention_bias")
    for key in ("attn_logit_softcapping", "use_second_mlp_block"):  # the second: a name of enable_moe_block
        if config.get(key):
            raise GrpoError(f"config.json has {key}, which vLLM reads and transformers ignores for Gemma 4: remove it")
    if config.get("use_bidirectional_attention") not in (None, "vision"):  # of images, which this family does not read
        raise GrpoError(
            f"config.json has use_bidirectional_attention {config['use_bidirectional_attention']!r}: only causal "
            "attention is supported"
        )
    layers = need(config, "num_hidden_layers")
    keys = {**_DEFAULTS, **{key: config[key] for key in _DEFAULTS if config.get(key) is not None}}
    heads = need(config, "num_key_value_heads")
    if not keys["attention_k_eq_v"]:  # transformers and vLLM then ignore the key
        keys["num_global_key_value_heads"] = None
    keys |= _of_full_layers(config)
    keys["num_global_key_value_heads"] = keys["num_global_key_value_heads"] or heads
    keys["partial_rotary_factor"] = need(_rope(config), FULL).get("partial_rotary_factor", 1.0)
    default = [SLIDING if number % 6 and number < layers else FULL for number in range(1, layers + 1)]
    kinds = config.get("layer_types") or default
    own = layers - keys["num_kv_shared_layers"]
    if kinds[-1] != FULL or not set(kinds[own:]) <= set(kinds[:own]):
        raise GrpoError(
            f"config.json has layer_types {', '.join(kinds)} and num_kv_shared_layers {layers - own}: the last layer "
            f"must be {FULL}, and a layer that shares keys needs one of its kind before the first of them"
        )
    vocabulary_size = config.get("vocab_size_per_layer_input", config["vocab_size"])
    if keys["hidden_size_per_layer_input"] and vocabulary_size != config["vocab_size"]:
        raise GrpoError(
            f"config.json has vocab_size_per_layer_input {vocabulary_size}: only vocab_size ({config['vocab_size']}) "
            "is supported"
        )
    experts: dict[str, Any] = {"num_experts": None}
    if config.get("enable_moe_block"):
        experts = {
            "num_experts": need(config, "num_experts"),
            "moe_router_topk": need(config, "top_k_experts"),
            "moe_ffn_hidden_size": need(config, "moe_intermediate_size"),
            "moe_router_pre_softmax": False,
        }
    elif config.get("num_experts"):  # vLLM reads this key, transformers the other
        raise GrpoError("config.json has num_experts and no enable_moe_block: remove the first, or set the second")
    return {
        **read_windows({**config, "layer_types": kinds}),
        **experts,
        "kv_channels": need(config, "head_dim"),
        "gemma4_config": keys,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
    }


def _of_full_layers(config):
    """Return the sizes of full-attention layers in per_layer_config, which transformers writes in place of two keys."""
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    layers = {int(number): sizes for number, sizes in (config.get("per_layer_config") or {}).items()}
    kinds = config.get("layer_types") or ()
    full = [layers.get(number, {}) for number, kind in enumerate(kinds) if kind == FULL]
    alike = len(layers) == len(full) and all(one == full[0] and one.keys() <= names.keys() for one in full)
    if layers and not alike:
        raise GrpoError(
            f"config.json has per_layer_config {layers}: supported are one head_dim and one num_key_value_heads for "
            f"all layers of {FULL}"
        )
    return {names[key]: value for key, value in full[0].items()} if layers else {}


def _write(args):
    keys = {key: args.gemma4_config[key] for key in _DEFAULTS}
    if not keys["attention_k_eq_v"]:
        keys["num_global_key_value_heads"] = None
    return {
        **write_windows(args),
        **keys,
        "head_dim": args.kv_channels,
        "vocab_size_per_layer_input": args.vocab_size,
        "final_logit_softcapping": args.final_logit_softcapping,
        "attention_bias": False,
        "enable_moe_block": bool(args.num_experts),
        "num_experts": args.num_experts,
        "top_k_experts": args.moe_router_topk if args.num_experts else None,
        "moe_intermediate_size": args.moe_ffn_hidden_size if args.num_experts else None,
    }


def _rope(config):
    """Return the rotary parameters of each kind of layer; those of a config.json without any are transformers'."""
    return config.get("rope_parameters") or {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    }


def _read_rope(config):
    rope = _rope(config)
    full, local = (dict(need(rope, kind)) for kind in (FULL, SLIDING))
    full.pop("partial_rotary_factor", None)
    kinds = full.pop("rope_type", None), local.get("rope_type", "default")
    if kinds != ("proportional", "default") or full.keys() - {"rope_theta"}:
        raise GrpoError(
            f"config.json has rope_parameters {rope}: supported are rope_type 'proportional' without a factor in "
            f"{FULL} layers and 'default' in {SLIDING} layers"
        )
    whole, windowed = (read_rope({**config, "rope_parameters": parameters}) for parameters in (full, local))
    return {**whole, "rotary_base_local": windowed["rotary_base"]}


def _write_rope(args):
    full = {"rope_type": "proportional", "rope_theta": float(args.rotary_base)}
    full["partial_rotary_factor"] = args.gemma4_config["partial_rotary_factor"]
    local = {"rope_type": "default", "rope_theta": float(args.rotary_base_local)}
    return {"rope_parameters": {FULL: full, SLIDING: local}}


def text_config(config: Config) -> Config:
    """Return the config.json of the language model of a published directory."""
    outside = {key: config[key] for key in quantized.CONFIG_KEYS | {"tie_word_embeddings"} if key in config}
    return {**need(config, "text_config"), **outside}


_OTHERS = tuple(f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"))


def _text_part(name: str) -> str | None:
    """Return a tensor's name in files of the language model alone; None for images and audio."""
    return None if name.startswith(_OTHERS) else name.replace("model.language_model.", "model.", 1)


def _unread(config: Config) -> tuple[str, ...]:
    """Return the names of keys and values, in published files, of layers that share those of others."""
    layers, shared = need(config, "num_hidden_layers"), config.get("num_kv_shared_layers") or 0
    return tuple(f"model.layers.{n}.self_attn.{part}_" for n in range(layers - shared, layers) for part in "kv")


FAMILY = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    mappings=_mappings(),
    fixed={
        **COMMON,
        **SOFTMAX_ROUTER,
        "multi_latent_attention": False,
        "moe_layer_freq": 1,
        "swiglu": False,
        "geglu": True,
        "sandwich_norm": True,
        "scale_embeddings": True,
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "softmax_scale": 1.0,
    },
    defaults={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512},
    read=_read,
    write=_write,
    read_rope=_read_rope,
    write_rope=_write_rope,
    activation=ACTIVATION,
    published=_text_part,
    unread=_unread,
)
# The language model alone of a published checkpoint.
TEXT_PART = replace(FAMILY, architecture="Gemma4ForConditionalGeneration", text_config=text_config)
