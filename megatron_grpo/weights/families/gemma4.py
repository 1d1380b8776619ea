"""Gemma 4, language model only: layers with and without a window of other head sizes, shared keys, layer embeddings."""

from dataclasses import replace

from megatron_grpo.models.gemma4 import layer_kinds
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import quantized
from megatron_grpo.weights.families.common import (
    DENSE,
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
from megatron_grpo.weights.families.windows import FULL, SLIDING, read_windows, write_windows
from megatron_grpo.weights.parameter_mapping import ParameterMapping, grouped_by, same, stacked, vocabulary

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


def _is_double(args, layer):
    return layer_kinds(args)[layer].ffn > args.ffn_hidden_size


def _mlp(size, when):
    gate_and_up = {HF + f"mlp.{part}_proj.weight": f"{size} hidden" for part in ("gate", "up")}
    return (
        ParameterMapping(MCORE + "mlp.linear_fc1.weight", gate_and_up, stacked, axis=0, when=when),
        ParameterMapping(
            MCORE + "mlp.linear_fc2.weight", {HF + "mlp.down_proj.weight": f"hidden {size}"}, axis=1, when=when
        ),
    )


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
    mlp = (
        *_mlp("ffn", lambda args, layer: not _is_double(args, layer)),
        *_mlp("double_ffn", _is_double),
        post_mlp,
        *_OWN,
    )
    embedding, *others = decoder_mappings(attention, mlp, "pre_feedforward_layernorm")
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
    if config.get("use_bidirectional_attention") not in (None, "vision"):  # of images, which this family does not read
        raise GrpoError(
            f"config.json has use_bidirectional_attention {config['use_bidirectional_attention']!r}: only causal "
            "attention is supported"
        )
    if config.get("enable_moe_block") or config.get("num_experts"):
        raise GrpoError("config.json has experts: of Gemma 4 only the models without experts are supported")
    layers = need(config, "num_hidden_layers")
    keys = {**_DEFAULTS, **{key: config[key] for key in _DEFAULTS if config.get(key) is not None}}
    heads = need(config, "num_key_value_heads")
    # transformers reads the number of full attention's heads only where keys are values.
    global_heads = keys["num_global_key_value_heads"] if keys["attention_k_eq_v"] else None
    keys["num_global_key_value_heads"] = global_heads or heads
    keys["partial_rotary_factor"] = _rope(config)["full_attention"].get("partial_rotary_factor", 1.0)
    windows = read_windows(config, lambda layer: (layer + 1) % 6 and layer + 1 < layers)
    kinds = config.get("layer_types") or []
    own = layers - keys["num_kv_shared_layers"]
    if kinds and (kinds[-1] != FULL or not set(kinds[own:]) <= set(kinds[:own])):
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
    return {
        **windows,
        "kv_channels": need(config, "head_dim"),
        "gemma4_config": keys,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
    }


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
        "enable_moe_block": False,
        "num_experts": None,
    }


def _rope(config):
    """Return the rotary parameters of each kind of layer; those of a config.json without any are transformers'."""
    return config.get("rope_parameters") or {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    }


def _read_rope(config):
    rope = _rope(config)
    full, local = dict(rope[FULL]), dict(rope[SLIDING])
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
        **DENSE,
        "swiglu": False,
        "geglu": True,
        "sandwich_norm": True,
        "scale_embeddings": True,
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "softmax_scale": 1.0,
    },
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
