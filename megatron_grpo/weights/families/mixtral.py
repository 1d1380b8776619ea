"""Mixtral: Mistral's attention, softmax router, experts of the size of a dense MLP (arXiv:2401.04088)."""

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import (
    COMMON,
    Family,
    decoder_mappings,
    grouped_attention,
    head_dim,
)
from megatron_grpo.weights.families.moe import SOFTMAX_ROUTER, read_uniform_moe, routed_experts, write_uniform_moe
from megatron_grpo.weights.families.windows import read_window, write_window


def _read(config):
    found = read_uniform_moe(config)
    if found["moe_router_topk"] == 1:
        raise GrpoError(
            "config.json has num_experts_per_tok 1: the expert's weight is always 1, so the router has no gradient"
        )
    return {**read_window(config), **found, "kv_channels": head_dim(config)}


def _write(args):
    return {**write_window(args), **write_uniform_moe(args), "head_dim": args.kv_channels}


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
