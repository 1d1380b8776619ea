"""Mixtral: Mistral's attention, softmax router, experts of the size of a dense MLP (arXiv:2401.04088)."""

from megatron_grpo.models.config import moe_layers
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import (
    COMMON,
    Family,
    decoder_mappings,
    grouped_attention,
    head_dim,
    need,
)
from megatron_grpo.weights.families.moe import SOFTMAX_ROUTER, routed_experts
from megatron_grpo.weights.families.windows import read_window, write_window


def _read(config):
    topk = need(config, "num_experts_per_tok")
    if topk == 1:
        raise GrpoError(
            "config.json has num_experts_per_tok 1: the expert's weight is always 1, so the router has no gradient"
        )
    return {
        **read_window(config),
        "kv_channels": head_dim(config),
        "num_experts": need(config, "num_local_experts"),
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": need(config, "intermediate_size"),
    }


def _write(args):
    if not all(moe_layers(args)) or args.ffn_hidden_size != args.moe_ffn_hidden_size:
        raise GrpoError(
            f"model family mixtral needs experts in every layer and one inner size, but has moe_layer_freq "
            f"{args.moe_layer_freq}, ffn_hidden_size {args.ffn_hidden_size}, moe_ffn_hidden_size "
            f"{args.moe_ffn_hidden_size}"
        )
    return {
        **write_window(args),
        "head_dim": args.kv_channels,
        "num_local_experts": args.num_experts,
        "num_experts_per_tok": args.moe_router_topk,
    }


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    mappings=decoder_mappings(grouped_attention(), routed_experts("block_sparse_moe", "w1", "w3", "w2")),
    fixed={
        **COMMON,
        **SOFTMAX_ROUTER,
        "qk_layernorm": False,
        "add_qkv_bias": False,
        "multi_latent_attention": False,
        "moe_layer_freq": 1,
        "moe_router_pre_softmax": False,
    },
    read=_read,
    write=_write,
    defaults={"num_key_value_heads": 8, "rope_theta": 1000000.0},
)
