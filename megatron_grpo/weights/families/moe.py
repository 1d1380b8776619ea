"""Mixtures of experts: parameter mappings and arguments that several families have in common."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_grpo.models.config import moe_layers
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.families.common import DENSE_MLP, HF, MCORE, Config, need
from megatron_grpo.weights.parameter_mapping import ParameterMapping, stacked

_EXPERT = MCORE + "mlp.experts.local_experts.{expert}."


def _sparse(args, layer):
    return moe_layers(args)[layer]


def _dense(args, layer):
    return not moe_layers(args)[layer]


def _biased(args, layer):
    return _sparse(args, layer) and args.moe_router_enable_expert_bias


def _shared(args, layer):
    return _sparse(args, layer) and bool(args.moe_shared_expert_intermediate_size)


def routed_experts(block: str, gate: str, up: str, down: str) -> tuple[ParameterMapping, ...]:
    """Return the mappings of router and experts, given the Hugging Face names of the block and its projections."""
    expert = f"{HF}{block}.experts.{{expert}}."
    return (
        ParameterMapping(MCORE + "mlp.router.weight", {f"{HF}{block}.gate.weight": "experts hidden"}, when=_sparse),
        ParameterMapping(
            _EXPERT + "linear_fc1.weight",
            {f"{expert}{gate}.weight": "expert_ffn hidden", f"{expert}{up}.weight": "expert_ffn hidden"},
            stacked,
            axis=0,
            when=_sparse,
        ),
        ParameterMapping(
            _EXPERT + "linear_fc2.weight", {f"{expert}{down}.weight": "hidden expert_ffn"}, axis=1, when=_sparse
        ),
    )


MLP = (
    *(replace(mapping, when=_dense) for mapping in DENSE_MLP),
    *routed_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ParameterMapping(
        MCORE + "mlp.router.expert_bias",
        {HF + "mlp.gate.e_score_correction_bias": "experts"},
        when=_biased,
        dtype=torch.float32,
    ),
    ParameterMapping(
        MCORE + "mlp.shared_experts.linear_fc1.weight",
        {
            HF + "mlp.shared_experts.gate_proj.weight": "shared_ffn hidden",
            HF + "mlp.shared_experts.up_proj.weight": "shared_ffn hidden",
        },
        stacked,
        axis=0,
        when=_shared,
    ),
    ParameterMapping(
        MCORE + "mlp.shared_experts.linear_fc2.weight",
        {HF + "mlp.shared_experts.down_proj.weight": "hidden shared_ffn"},
        axis=1,
        when=_shared,
    ),
)


def with_gated_shared_expert(mappings: Sequence[ParameterMapping]) -> tuple[ParameterMapping, ...]:
    """Return the mappings of ``MLP`` with the shared expert's gate, and with Qwen's name of the expert."""
    gate = ParameterMapping(
        MCORE + "mlp.shared_experts.gate_weight", {HF + "mlp.shared_expert_gate.weight": "one hidden"}, when=_shared
    )
    renamed = [
        replace(
            one, hf={name.replace("mlp.shared_experts.", "mlp.shared_expert."): dims for name, dims in one.hf.items()}
        )
        for one in mappings
    ]
    return (*renamed, gate)


# Softmax router without expert groups, expert biases, scaling or shared experts.
SOFTMAX_ROUTER = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_intermediate_size": None,
}


def read_moe(config: Config, sparse: Sequence[bool]) -> dict[str, Any]:
    """Return the arguments of every mixture of experts; `sparse`: whether each decoder layer is one."""
    if not any(sparse):
        raise GrpoError("config.json describes no layer with experts: use the architecture of the dense family")
    return {
        "moe_ffn_hidden_size": need(config, "moe_intermediate_size"),
        "moe_router_topk": need(config, "num_experts_per_tok"),
        "moe_layer_freq": 1 if all(sparse) else [int(layer) for layer in sparse],
    }


def write_moe(args: Namespace) -> Config:
    """Return the config.json keys that read_moe reads, except those of the layers."""
    return {"moe_intermediate_size": args.moe_ffn_hidden_size, "num_experts_per_tok": args.moe_router_topk}


def read_uniform_moe(config: Config) -> dict[str, Any]:
    """Return the arguments of experts in every layer, of the size that config.json calls that of the MLP."""
    return {
        "num_experts": need(config, "num_local_experts"),
        "moe_router_topk": need(config, "num_experts_per_tok"),
        "moe_ffn_hidden_size": need(config, "intermediate_size"),
    }


def write_uniform_moe(args: Namespace) -> Config:
    """Return the config.json keys that read_uniform_moe reads, except that of the size."""
    if not all(moe_layers(args)) or args.ffn_hidden_size != args.moe_ffn_hidden_size:
        raise GrpoError(
            f"model family {args.model_family} needs experts in every layer and one inner size, but has moe_layer_freq "
            f"{args.moe_layer_freq}, ffn_hidden_size {args.ffn_hidden_size}, moe_ffn_hidden_size "
            f"{args.moe_ffn_hidden_size}"
        )
    return {"num_local_experts": args.num_experts, "num_experts_per_tok": args.moe_router_topk}
