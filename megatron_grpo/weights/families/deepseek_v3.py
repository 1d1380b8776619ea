"""DeepSeek-V3 and its kin (R1, Kimi-K2, Moonlight): sigmoid routing with a bias, multi-token prediction
(arXiv:2412.19437); the rest is DeepSeek-V2's.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import COMMON, HF, Config, Family, decoder_rows
from megatron_grpo.weights.families.deepseek_v2 import read_deepseek_moe, write_deepseek_moe
from megatron_grpo.weights.families.mla import ATTENTION, FIXED, read_mla, read_mla_rope, write_mla, write_mla_rope
from megatron_grpo.weights.families.moe import MLP
from megatron_grpo.weights.parameter_mapping import ParameterMapping, untied, vocabulary

_MTP = "mtp.layers.{mtp}."
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
MTP_ROWS = (
    ParameterMapping(_MTP + "enorm.weight", {HF + "enorm.weight": "hidden"}),
    ParameterMapping(_MTP + "hnorm.weight", {HF + "hnorm.weight": "hidden"}),
    ParameterMapping(_MTP + "eh_proj.weight", {HF + "eh_proj.weight": "hidden two_hidden"}, axis=0),
    ParameterMapping(_MTP + "final_layernorm.weight", {HF + "shared_head.norm.weight": "hidden"}),
    # The files hold the embedding and the output layer again.
    ParameterMapping(_EMBEDDING, {HF + "embed_tokens.weight": "vocab hidden"}, vocabulary, axis=0),
    ParameterMapping(_HEAD, {HF + "shared_head.head.weight": "vocab hidden"}, vocabulary, axis=0, when=untied),
)
# Keys of DeepSeek's own code, and transformers' rope_interleave; vLLM has the bias only where topk_method says so.
_ONLY = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
}


def read_sigmoid_moe(config: Config, only: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of experts that a sigmoid router chooses by groups, and of multi-token prediction; `only` as for
    read_deepseek_moe.
    """
    found = read_deepseek_moe(config, only)
    groups, chosen, topk = config.get("n_group") or 1, config.get("topk_group") or 1, found["moe_router_topk"]
    if topk == 1:
        raise GrpoError("config.json has one expert per token, whose weight Megatron-Core does not normalise to 1")
    if groups == chosen:  # no group is left out
        groups = chosen = None
    elif topk // chosen != 2:
        raise GrpoError(
            f"config.json chooses groups by their best 2 experts, Megatron-Core by their best num_experts_per_tok "
            f"({topk}) // topk_group ({chosen}) = {topk // chosen}"
        )
    return {
        **found,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "mtp_num_layers": config.get("num_nextn_predict_layers") or None,
    }


def write_sigmoid_moe(args: Namespace) -> Config:
    """The keys that read_sigmoid_moe reads, but for `only`."""
    return {
        **write_deepseek_moe(args),
        "n_group": args.moe_router_num_groups or 1,
        "topk_group": args.moe_router_group_topk or 1,
        "num_nextn_predict_layers": args.mtp_num_layers or 0,
    }


def _read(config):
    return {**read_mla(config), **read_sigmoid_moe(config, _ONLY)}


def _write(args):
    return {**write_mla(args), **write_sigmoid_moe(args), **_ONLY}


SIGMOID_ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    rows=decoder_rows(ATTENTION, MLP),
    fixed={**COMMON, **FIXED, **SIGMOID_ROUTER},
    read=_read,
    write=_write,
    read_rope=read_mla_rope,
    write_rope=write_mla_rope,
    mtp_rows=MTP_ROWS,
)
