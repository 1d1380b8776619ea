"""Qwen3-MoE: Qwen3's attention, softmax router, no shared experts."""

from megatron_grpo.models.config import moe_layers
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import (
    COMMON,
    Family,
    decoder_mappings,
    grouped_attention,
    head_dim,
    need,
    refuse_bias,
)
from megatron_grpo.weights.families.moe import MLP, SOFTMAX_ROUTER, read_moe, write_moe
from megatron_grpo.weights.families.qwen3 import HEAD_NORMS
from megatron_grpo.weights.families.windows import read_window, write_window

MAPPINGS = decoder_mappings(grouped_attention(*HEAD_NORMS), MLP)


def _read(config):
    refuse_bias(config, "attention_bias")
    # transformers 5 writes num_local_experts.
    experts = config.get("num_local_experts") or need(config, "num_experts")
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(config["num_hidden_layers"])]
    found = read_moe(config, sparse)
    # Normalised over the chosen experts, the weights equal a softmax over the logits of these experts.
    normalised = bool(config.get("norm_topk_prob"))
    if normalised and found["moe_router_topk"] == 1:
        raise GrpoError("config.json has norm_topk_prob true and num_experts_per_tok 1: the router has no gradient")
    return {
        **found,
        **(read_window(config, default=4096) if config.get("use_sliding_window") else {}),
        "num_experts": experts,
        "kv_channels": head_dim(config),
        "moe_router_pre_softmax": not normalised,
    }


def _write(args):
    return {
        **write_moe(args),
        "num_experts": args.num_experts,
        "head_dim": args.kv_channels,
        "norm_topk_prob": not args.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, sparse in enumerate(moe_layers(args)) if not sparse],
        "attention_bias": False,
        **write_window(args),
        "use_sliding_window": bool(args.window_size),
    }


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    mappings=MAPPINGS,
    fixed={
        **COMMON,
        **SOFTMAX_ROUTER,
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "multi_latent_attention": False,
    },
    read=_read,
    write=_write,
    defaults={"num_key_value_heads": 4},
)
