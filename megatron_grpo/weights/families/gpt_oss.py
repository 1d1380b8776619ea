"""gpt-oss (arXiv:2508.10925): attention sinks, alternating sliding windows, biases, clamped SwiGLU in the experts."""

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import (
    COMMON,
    HF,
    MCORE,
    QKV_BIAS,
    Family,
    decoder_mappings,
    grouped_attention,
    need,
    read_rope,
)
from megatron_grpo.weights.families.moe import SOFTMAX_ROUTER
from megatron_grpo.weights.families.windows import read_windows, write_windows
from megatron_grpo.weights.parameter_mapping import ParameterMapping, interleaved

_EXPERT, _EXPERTS = MCORE + "mlp.experts.local_experts.{expert}.", HF + "mlp.experts."
ATTENTION = (
    *grouped_attention(
        QKV_BIAS,
        ParameterMapping(
            MCORE + "self_attention.core_attention.softmax_offset", {HF + "self_attn.sinks": "heads"}, axis=0
        ),
    ),
    ParameterMapping(MCORE + "self_attention.linear_proj.bias", {HF + "self_attn.o_proj.bias": "hidden"}),
)
MLP = (
    ParameterMapping(MCORE + "mlp.router.weight", {HF + "mlp.router.weight": "experts hidden"}),
    ParameterMapping(MCORE + "mlp.router.bias", {HF + "mlp.router.bias": "experts"}),
    ParameterMapping(
        _EXPERT + "linear_fc1.weight",
        {_EXPERTS + "gate_up_proj": "experts hidden two_expert_ffn"},
        interleaved,
        axis=0,
        all_experts=True,
        transposed=True,
    ),
    ParameterMapping(
        _EXPERT + "linear_fc1.bias",
        {_EXPERTS + "gate_up_proj_bias": "experts two_expert_ffn"},
        interleaved,
        axis=0,
        all_experts=True,
    ),
    ParameterMapping(
        _EXPERT + "linear_fc2.weight",
        {_EXPERTS + "down_proj": "experts expert_ffn hidden"},
        axis=1,
        all_experts=True,
        transposed=True,
    ),
    ParameterMapping(_EXPERT + "linear_fc2.bias", {_EXPERTS + "down_proj_bias": "experts hidden"}, all_experts=True),
)
# vLLM's model has these values and ignores the keys in config.json.
_SUPPORTED = {
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
_YARN = {"rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}


def _read_rope(config):
    found = read_rope(config)
    scaling = found["rope_scaling"] or {}
    if scaling.get("rope_type") != "yarn" or scaling.keys() - {"truncate"} != _YARN:
        raise GrpoError(
            f"config.json has rope parameters {scaling}: the engine supports only yarn for gpt-oss, with "
            f"{', '.join(sorted(_YARN))} and optionally truncate"
        )
    return found


def _read(config):
    for key, value in _SUPPORTED.items():
        if config.get(key, value) != value:
            raise GrpoError(f"config.json has {key} {config[key]}: the engine supports only {value} for gpt-oss")
    windows = read_windows(config, lambda layer: layer % 2 == 0)
    if windows["window_size"] and windows["window_attn_skip_freq"] != 2:
        raise GrpoError(
            f"config.json has layer_types {config['layer_types']}: the engine supports a window only in the "
            "first, third, fifth ... layer"
        )
    return {
        **windows,
        "kv_channels": need(config, "head_dim"),
        "num_experts": need(config, "num_local_experts"),
        "moe_router_topk": need(config, "num_experts_per_tok"),
        "moe_ffn_hidden_size": need(config, "intermediate_size"),
    }


def _write(args):
    if args.moe_ffn_hidden_size != args.ffn_hidden_size:
        raise GrpoError(
            f"model family gpt_oss has experts in every layer, of size --ffn-hidden-size ({args.ffn_hidden_size}), but "
            f"moe_ffn_hidden_size is {args.moe_ffn_hidden_size}"
        )
    return {
        **_SUPPORTED,
        **write_windows(args),
        "head_dim": args.kv_channels,
        "num_local_experts": args.num_experts,
        "num_experts_per_tok": args.moe_router_topk,
    }


FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    mappings=decoder_mappings(ATTENTION, MLP),
    fixed={
        **COMMON,
        **SOFTMAX_ROUTER,
        "swiglu": False,
        "quick_geglu": True,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "softmax_type": "learnable",
        "multi_latent_attention": False,
        "moe_layer_freq": 1,
        "moe_router_pre_softmax": False,
    },
    read=_read,
    write=_write,
    read_rope=_read_rope,
    defaults={"head_dim": 64, "num_key_value_heads": 8, "rope_theta": 150000, "sliding_window": 128},
)
