"""Code that all families share: the Family record, and the keys of config.json that dense models have in common."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.models.rope import check_scaling
from megatron_grpo.parallel.arguments import query_groups
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import quantized
from megatron_grpo.weights.parameter_mapping import ParameterMapping, fused, grouped_qkv, stacked, untied, vocabulary

Config = dict[str, Any]

# Arguments of most families: rotary embedding, RMSNorm, and SwiGLU without biases.
COMMON = {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope"}
# Features of some families only: argument -> its value in a model without the feature. A family with the feature sets
# the argument in `fixed`, or in `read` and `write`; all other families refuse it.
ABSENT: dict[str, Any] = {
    "window_size": None,
    "window_attn_skip_freq": None,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rope_scaling": None,
    "mrope_section": None,
    "vision_config": None,
    "rotary_base_local": None,
    "gemma4_config": None,
    "apply_layernorm_1p": False,
    "sandwich_norm": False,
    "qk_layernorm_across_heads": False,
    "geglu": False,
    "scale_embeddings": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "quick_geglu": False,
    "attention_output_gate": False,
    "moe_shared_expert_gate": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "squared_relu": False,
    "hybrid_layer_pattern": None,
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_num_heads": None,
}
DENSE = {**COMMON, "num_experts": None, "multi_latent_attention": False}

# Keys of no family here that the engine or transformers applies in some of them, and their values without effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),  # both: attention to later tokens
    "bias": (False,),  # vLLM's Llama, and families that it derives from Llama
    "qkv_bias": (False,),  # the same, and Qwen3-Next
    "logit_scale": (1.0,),  # as the key "bias"
    "llama_4_scaling": (),  # vLLM's Mistral and DeepSeek: queries are scaled by their position
    "dual_chunk_attention_config": (),  # vLLM's Qwen: Qwen2.5-1M
    "rotary_pct": (1.0,),  # vLLM: other names of partial_rotary_factor
    "rotary_emb_fraction": (1.0,),
    "rswa_window": (),  # vLLM's DeepSeek: a window
    "index_topk": (),  # vLLM's DeepSeek: an indexer chooses tokens
}

MCORE = "decoder.layers.{layer}."
HF = "model.layers.{layer}."

EMBEDDING = ParameterMapping(
    "embedding.word_embeddings.weight", {"model.embed_tokens.weight": "vocab hidden"}, vocabulary, axis=0
)
OUTPUT = ParameterMapping("output_layer.weight", {"lm_head.weight": "vocab hidden"}, vocabulary, axis=0, when=untied)
QKV_BIAS = ParameterMapping(
    MCORE + "self_attention.linear_qkv.bias",
    {HF + "self_attn.q_proj.bias": "q", HF + "self_attn.k_proj.bias": "kv", HF + "self_attn.v_proj.bias": "kv"},
    grouped_qkv,
    axis=0,
    when=lambda args, layer: args.add_qkv_bias,
)
DENSE_MLP = (
    ParameterMapping(
        MCORE + "mlp.linear_fc1.weight",
        {HF + "mlp.gate_proj.weight": "ffn hidden", HF + "mlp.up_proj.weight": "ffn hidden"},
        stacked,
        axis=0,
    ),
    ParameterMapping(MCORE + "mlp.linear_fc2.weight", {HF + "mlp.down_proj.weight": "hidden ffn"}, axis=1),
)
FUSED_MLP = (
    ParameterMapping(
        MCORE + "mlp.linear_fc1.weight",
        {HF + "mlp.gate_up_proj.weight": "two_ffn hidden"},
        fused(stacked, "ffn", "ffn"),
        axis=0,
    ),
    DENSE_MLP[1],
)


def grouped_attention(*more: ParameterMapping, hf: str = HF + "self_attn.") -> tuple[ParameterMapping, ...]:
    """Return the mappings of grouped-query attention; `more`: mappings that a family adds after the QKV weight.

    ``hf``: what the names in Hugging Face files begin with.
    """
    qkv = ParameterMapping(
        MCORE + "self_attention.linear_qkv.weight",
        {hf + "q_proj.weight": "q hidden", hf + "k_proj.weight": "kv hidden", hf + "v_proj.weight": "kv hidden"},
        grouped_qkv,
        axis=0,
    )
    projection = ParameterMapping(
        MCORE + "self_attention.linear_proj.weight", {hf + "o_proj.weight": "hidden q"}, axis=1
    )
    return (qkv, *more, projection)


def dense_mappings(*attention: ParameterMapping) -> tuple[ParameterMapping, ...]:
    """Return the table of a dense Llama-like model; `attention`: mappings that a family adds after the QKV weight."""
    return decoder_mappings(grouped_attention(*attention), DENSE_MLP)


def decoder_mappings(
    attention: Sequence[ParameterMapping],
    mlp: Sequence[ParameterMapping],
    pre_mlp_norm: str = "post_attention_layernorm",
) -> tuple[ParameterMapping, ...]:
    """Return the table of a Llama-like model; `pre_mlp_norm`: Hugging Face name of the norm before the MLP."""
    return (
        EMBEDDING,
        ParameterMapping(MCORE + "input_layernorm.weight", {HF + "input_layernorm.weight": "hidden"}),
        *attention,
        ParameterMapping(MCORE + "pre_mlp_layernorm.weight", {HF + f"{pre_mlp_norm}.weight": "hidden"}),
        *mlp,
        ParameterMapping("decoder.final_layernorm.weight", {"model.norm.weight": "hidden"}),
        OUTPUT,
    )


def sandwich_norms(attention: str, mlp: str) -> tuple[ParameterMapping, ParameterMapping]:
    """Return the mappings of the norms after attention and MLP (--sandwich-norm), given their Hugging Face names."""
    return (
        ParameterMapping(
            MCORE + "self_attention.linear_proj.post_layernorm.weight", {HF + f"{attention}.weight": "hidden"}
        ),
        ParameterMapping(MCORE + "mlp.linear_fc2.post_layernorm.weight", {HF + f"{mlp}.weight": "hidden"}),
    )


def need(config: Mapping[str, Any], key: str) -> Any:
    """Return config[key]; raise GrpoError when it is missing or null."""
    if config.get(key) is None:
        raise GrpoError(f"config.json lacks {key!r}: it does not describe a model of type {config.get('model_type')!r}")
    return config[key]


def rope_of(config: Config, partial: bool = False) -> tuple[int | float, float, Config | None]:
    """Return (theta, fraction of a head that is rotated, scaling as in models/rope.py) of the rotary embedding.

    Reads both formats: `rope_theta` and `rope_scaling` (transformers 4), and `rope_parameters` (transformers 5). Raises
    GrpoError for a fraction less than 1 unless `partial` allows it.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise GrpoError("config.json has rope parameters for each kind of layer: only one kind of layer is supported")
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000
    percent = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if percent != 1.0 and not partial:
        raise GrpoError(f"config.json has partial_rotary_factor {percent}: this family supports 1.0 only")
    old = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or old or "default"
    if ignored := {"rope_dim", "use_fope"} & rope.keys():
        raise GrpoError(
            f"config.json has rope parameters {', '.join(sorted(ignored))}, which only vLLM reads: remove them"
        )
    original = config.get("original_max_position_embeddings")
    # transformers prefers this key to the one within the scaling.
    if original and kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = original
    scaling = {"rope_type": kind, **{name: value for name, value in rope.items() if value is not None}}
    return int(theta) if theta == int(theta) else theta, percent, None if kind == "default" else scaling


def read_rope(config: Config, partial: bool = False) -> dict[str, Any]:
    """Return the arguments of the rotary embedding; `partial`: see rope_of."""
    theta, percent, scaling = rope_of(config, partial)
    check_scaling(scaling, need(config, "max_position_embeddings"))
    return {"rotary_base": theta, "rotary_percent": percent, "rope_scaling": scaling}


def read_partial_rope(config: Config) -> dict[str, Any]:
    """Return the arguments of a rotary embedding that may rotate only a part of each head."""
    return read_rope(config, partial=True)


def write_rope(args: Namespace) -> Config:
    """Return the config.json keys that read_rope reads."""
    if args.rotary_percent != 1.0:
        raise GrpoError(f"model family {args.model_family} rotates whole heads: leave out --rotary-percent")
    return rope_keys(args, args.rope_scaling)


def write_partial_rope(args: Namespace) -> Config:
    """Return the config.json keys that read_partial_rope reads."""
    keys = rope_keys(args, args.rope_scaling)
    part = {"partial_rotary_factor": args.rotary_percent}
    return {**keys, **part, "rope_parameters": {**keys["rope_parameters"], **part}}


def rope_keys(args: Namespace, scaling: Mapping[str, Any] | None) -> Config:
    """Return the keys in both formats: a reader of either one silently uses a default theta when its key is missing."""
    parameters = {"rope_theta": args.rotary_base, **(scaling or {"rope_type": "default"})}
    return {"rope_theta": args.rotary_base, "rope_scaling": scaling, "rope_parameters": parameters}


@dataclass(frozen=True)
class Family:
    """One model family: its names, its table of parameter mappings, and the translation of config.json both ways.

    `fixed`: arguments with the same value in all models of the family.
    `read(config)`: the family's other arguments from a config.json; GrpoError for an unsupported setting.
    `write(args)`: the config.json keys that `read` reads.
    `read_rope`, `write_rope`: the same for the rotary embedding.
    `mtp_mappings`: parameters of a multi-token-prediction layer besides its decoder layer; empty in families without.
    `mtp_layer`: the mappings of its decoder layer; None: those of the model's layers.
    `mtp_prefix`: what the Hugging Face names of these layers begin with; None: what those of decoder layers begin with.
    With a prefix config.json leaves open whether the model has these layers, and only --mtp-num-layers reads them.
    `stacked`: tensors that have the matrices of all experts of a layer in some files -> name patterns of the matrices.
    `activation`: config.json key of the MLP's activation function, and its value.
    `published(name)`: the name of a tensor in the table, where files have others; None for a tensor to leave out.
    `unread(config)`: what the names, as in the table, of further tensors to leave out begin with.
    `text_config(config)`: a config.json with the keys of the language model at its top; `hf_config`: the inverse.
    `defaults`: values of keys that a config.json leaves out, as transformers and the engine have them, where they are
    not those of `read` and `read_rope`.
    """

    name: str
    architecture: str
    mappings: tuple[ParameterMapping, ...]
    fixed: Mapping[str, Any]
    read: Callable[[Config], dict[str, Any]]
    write: Callable[[Namespace], Config]
    read_rope: Callable[[Config], dict[str, Any]] = read_rope
    write_rope: Callable[[Namespace], Config] = write_rope
    mtp_mappings: tuple[ParameterMapping, ...] = ()
    mtp_layer: tuple[ParameterMapping, ...] | None = None
    mtp_prefix: str | None = None
    stacked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    published: Callable[[str], str | None] | None = None
    unread: Callable[[Config], tuple[str, ...]] = lambda config: ()
    text_config: Callable[[Config], Config] = dict
    hf_config: Callable[[Config], Config] = dict
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def args_from_hf(self, config: Config) -> dict[str, Any]:
        """Return the arguments (Megatron-LM's attribute names -> values) of the model that a config.json describes.

        Raises GrpoError for a missing key, or for a setting that cannot be expressed by the arguments.
        """
        config = {**self.defaults, **self.text_config(config)}
        try:
            key, activation = self.activation
            if need(config, key) != activation:
                raise GrpoError(f"config.json has {key} {config[key]!r}: only {activation!r} is supported")
            found = {**ABSENT, **self.fixed, **_read_common(config), **self.read_rope(config), **self.read(config)}
            words = {"rope_type", "hybrid_layer_pattern", "moe_router_score_function"} | {
                dest for dest, value in {**ABSENT, **self.fixed}.items() if isinstance(value, str)
            }
            for dest, value in found.items():
                if isinstance(value, str) and dest not in words:
                    raise TypeError(f"{dest} is {value!r}")
            return {"model_family": self.name, **found}
        except (AttributeError, TypeError, ValueError) as error:
            raise GrpoError(f"config.json has a value of the wrong type: {error}") from error

    def hf_from_args(self, args: Namespace) -> Config:
        """Return the config.json of the model that `args` describe; the inverse of args_from_hf.

        Raises GrpoError when an argument has a value that no model of the family has.
        """
        self._check(args, self.fixed)
        names = dict([("architectures", [self.architecture]), ("model_type", self.name), self.activation])
        config = self.hf_config({**names, **_write_common(args), **self.write_rope(args), **self.write(args)})
        written = self.args_from_hf(config)  # lacks a feature that the family cannot express
        self._check(args, {dest: written[dest] for dest in ABSENT})
        return config

    def _check(self, args: Namespace, values: Mapping[str, Any]) -> None:
        for dest, value in values.items():
            if getattr(args, dest) != value:
                raise GrpoError(
                    f"model family {self.name} has {dest} = {value}, but the arguments say {getattr(args, dest)}: "
                    f"correct the flag or choose another --model-family"
                )


def refuse_window(config: Config) -> None:
    """Raise GrpoError for a window: vLLM gives it to all attention layers of one kind, except latent ones."""
    if config.get("sliding_window"):
        raise GrpoError(
            f"config.json has sliding_window {config['sliding_window']}, which transformers ignores in this family, "
            "but vLLM's usual attention applies: remove the key"
        )


def refuse_bias(config: Config, *keys: str) -> None:
    """Raise GrpoError when one of these bias keys is true."""
    for key in keys:
        if config.get(key):
            raise GrpoError(f"config.json has {key} true: this family is supported without these biases only")


def _read_common(config: Config) -> dict[str, Any]:
    quantized.check_config(config)
    for key, values in _NEUTRAL.items():
        if config.get(key) is not None and config[key] not in values:
            raise GrpoError(
                f"config.json has {key} {config[key]!r}, which the model here does not have: remove the key"
            )
    heads = need(config, "num_attention_heads")
    return {
        "num_layers": need(config, "num_hidden_layers"),
        "hidden_size": need(config, "hidden_size"),
        "ffn_hidden_size": need(config, "intermediate_size"),
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "norm_epsilon": need(config, "rms_norm_eps"),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "vocab_size": need(config, "vocab_size"),
        "max_position_embeddings": need(config, "max_position_embeddings"),
    }


def _write_common(args: Namespace) -> Config:
    return {
        "num_hidden_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": query_groups(args),
        "rms_norm_eps": args.norm_epsilon,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_position_embeddings,
    }


def head_dim(config: Config) -> int:
    """Return the size of an attention head: config["head_dim"], or hidden_size / num_attention_heads."""
    return config.get("head_dim") or need(config, "hidden_size") // need(config, "num_attention_heads")


def refuse_head_dim(args: Namespace) -> None:
    """Raise GrpoError unless a head has hidden_size / num_attention_heads channels: config.json has no other key."""
    if args.kv_channels * args.num_attention_heads != args.hidden_size:
        raise GrpoError(
            f"model family {args.model_family} has heads of hidden_size / num_attention_heads channels: kv_channels "
            f"({args.kv_channels}) times num_attention_heads ({args.num_attention_heads}) is not hidden_size "
            f"({args.hidden_size})"
        )
