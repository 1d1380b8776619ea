"""DeepSeek-V3 and models with its architecture (R1, Kimi-K2, Moonlight).

DeepSeek-V2 with sigmoid routing, expert biases and multi-token prediction. Source: arXiv:2412.19437.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import COMMON, HF, Config, Family, decoder_mappings
from megatron_grpo.weights.families.deepseek_v2 import read_deepseek_moe, write_deepseek_moe
from megatron_grpo.weights.families.mla import ATTENTION, FIXED, read_mla, read_mla_rope, write_mla, write_mla_rope
from megatron_grpo.weights.families.moe import MLP
from megatron_grpo.weights.parameter_mapping import ParameterMapping, untied, vocabulary

_MTP = "mtp.layers.{mtp}."
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
MTP_MAPPINGS = (
    ParameterMapping(_MTP + "enorm.weight", {HF + "enorm.weight": "hidden"}),
    ParameterMapping(_MTP + "hnorm.weight", {HF + "hnorm.weight": "hidden"}),
    ParameterMapping(_MTP + "eh_proj.weight", {HF + "eh_proj.weight": "hidden two_hidden"}, axis=0),
    ParameterMapping(_MTP + "final_layernorm.weight", {HF + "shared_head.norm.weight": "hidden"}),
    # The files hold duplicates of the embedding and the output layer.
    ParameterMapping(_EMBEDDING, {HF + "embed_tokens.weight": "vocab hidden"}, vocabulary, axis=0),
    ParameterMapping(_HEAD, {HF + "shared_head.head.weight": "vocab hidden"}, vocabulary, axis=0, when=untied),
)
# Supported values of keys of DeepSeek's own code and of transformers' rope_interleave. vLLM loads the expert bias only
# with topk_method noaux_tc.
_SUPPORTED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
}


def read_sigmoid_moe(config: Config, supported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a sigmoid router with expert groups, and of multi-token prediction.

    `supported`: as in read_deepseek_moe.
    """
    found = read_deepseek_moe(config, supported)
    return {
        **found,
        **read_groups(config, found["moe_router_topk"]),
        "mtp_num_layers": config.get("num_nextn_predict_layers") or None,
    }


def read_groups(config: Config, topk: int) -> dict[str, Any]:
    """Return the arguments of a sigmoid router's expert groups, from which ``topk`` experts are chosen."""
    groups, chosen = (1 if config.get(key) is None else config[key] for key in ("n_group", "topk_group"))
    if topk == 1:
        raise GrpoError(
            "config.json has num_experts_per_tok 1: Megatron-Core does not normalise a single expert's weight to 1"
        )
    if not 1 <= chosen <= groups:
        raise GrpoError(f"config.json has n_group {groups} and topk_group {chosen}: give 1 <= topk_group <= n_group")
    if groups == chosen:  # every group is chosen
        groups = chosen = None
    elif topk // chosen != 2:
        raise GrpoError(
            f"config.json scores groups by their best 2 experts, Megatron-Core by their best num_experts_per_tok "
            f"({topk}) // topk_group ({chosen}) = {topk // chosen}"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def write_sigmoid_moe(args: Namespace) -> Config:
    """Return the config.json keys that read_sigmoid_moe reads, except those of `supported`."""
    return {
        **write_deepseek_moe(args),
        "n_group": args.moe_router_num_groups or 1,
        "topk_group": args.moe_router_group_topk or 1,
        "num_nextn_predict_layers": args.mtp_num_layers or 0,
    }


def _read(config):
    return {**read_mla(config), **read_sigmoid_moe(config, _SUPPORTED)}


def _write(args):
    return {**write_mla(args), **write_sigmoid_moe(args), **_SUPPORTED}


SIGMOID_ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    mappings=decoder_mappings(ATTENTION, MLP),
    fixed={**COMMON, **FIXED, **SIGMOID_ROUTER},
    read=_read,
    write=_write,
    read_rope=read_mla_rope,
    write_rope=write_mla_rope,
    mtp_mappings=MTP_MAPPINGS,
    defaults={"first_k_dense_replace": 3, "n_group": 8, "n_shared_experts": 1, "q_lora_rank": 1536, "topk_group": 4},
)
