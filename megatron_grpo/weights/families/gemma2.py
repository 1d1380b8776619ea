"""Gemma 2 (arXiv:2408.00118): norms before and after attention and MLP, alternating sliding windows, soft caps."""

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import (
    DENSE,
    DENSE_MLP,
    Family,
    decoder_mappings,
    grouped_attention,
    need,
    refuse_bias,
    sandwich_norms,
)
from megatron_grpo.weights.families.windows import read_windows, write_windows
from megatron_grpo.weights.parameter_mapping import ParameterMapping


def gemma_mappings(*attention: ParameterMapping) -> tuple[ParameterMapping, ...]:
    """Return the table of Gemma 2 and 3; `attention`: mappings to add after the QKV weight."""
    post_attention, post_mlp = sandwich_norms("post_attention_layernorm", "post_feedforward_layernorm")
    return decoder_mappings(
        (*grouped_attention(*attention), post_attention), (*DENSE_MLP, post_mlp), "pre_feedforward_layernorm"
    )


FIXED = {
    **DENSE,
    "swiglu": False,
    "geglu": True,
    "apply_layernorm_1p": True,
    "sandwich_norm": True,
    "scale_embeddings": True,
    "add_qkv_bias": False,
}
ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")


def read_gemma(config, full_every):
    """Return the arguments of Gemma 2 and 3; every `full_every`-th layer has no window."""
    refuse_bias(config, "attention_bias", "use_bidirectional_attention")
    need(config, "sliding_window")
    return {
        **read_windows(config, lambda layer: (layer + 1) % full_every),
        "kv_channels": need(config, "head_dim"),
        "softmax_scale": need(config, "query_pre_attn_scalar") ** -0.5,
        # true is transformers' default for Gemma; it omits the key then
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
    }


def write_gemma(args):
    """Return the config.json keys that read_gemma reads."""
    if args.softmax_scale is None or args.window_size is None:
        raise GrpoError(f"model family {args.model_family} needs --softmax-scale and --window-size: give both")
    return {
        **write_windows(args),
        "head_dim": args.kv_channels,
        "query_pre_attn_scalar": round(args.softmax_scale**-2),
        "attention_bias": False,
    }


def _read(config):
    found = read_gemma(config, full_every=2)
    if found["untie_embeddings_and_output_weights"]:
        raise GrpoError("config.json has tie_word_embeddings false, but vLLM's Gemma 2 has no separate output layer")
    return {
        **found,
        "attn_logit_softcapping": config.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": config.get("final_logit_softcapping", 30.0),
    }


def _write(args):
    caps = {key: getattr(args, key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {**write_gemma(args), **caps, "hidden_act": ACTIVATION[1]}


FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    mappings=gemma_mappings(),
    fixed={**FIXED, "qk_layernorm": False, "untie_embeddings_and_output_weights": False},
    read=_read,
    write=_write,
    activation=ACTIVATION,
    defaults={"num_key_value_heads": 4},
)
