"""A family's table joined with a built model: global names, shapes, and which pipeline stage holds what."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_grpo.parallel.arguments import query_groups
from megatron_grpo.utils.cpu_backend import device
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import families
from megatron_grpo.weights.parameter_mapping import Dimensions, ParameterMapping, Weight

# Transformer Engine's layer spec fuses a norm into the linear layer behind it; the local spec's names are canonical.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_MTP_LAYER = "mtp.layers.{mtp}.transformer_layer"
# Experts by megatron-core's SequentialMLP, by Transformer Engine's grouped layers, and stacked by models/experts.py.
_SEQUENTIAL = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_GROUPED = re.compile(r"experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_STACKED = re.compile(r"experts\.(linear_fc[12]\.(?:weight|bias))")


def dimensions(args: Namespace) -> Dimensions:
    """The sizes that the tables' shapes and layouts are spelled in."""
    head, heads, groups = args.kv_channels, args.num_attention_heads, query_groups(args)
    dims = Dimensions(
        {
            "hidden": args.hidden_size,
            "two_hidden": 2 * args.hidden_size,
            "ffn": args.ffn_hidden_size,
            "two_ffn": 2 * args.ffn_hidden_size,
            "head": head,
            "heads": heads,
            "q": head * heads,
            "kv": head * groups,
            "qkv": head * (heads + 2 * groups),
            "groups": groups,
            "vocab": args.vocab_size,
            "padded_vocab": args.padded_vocab_size,
        }
    )
    if args.num_experts:
        dims |= {
            "experts": args.num_experts,
            "expert_ffn": args.moe_ffn_hidden_size,
            "two_expert_ffn": 2 * args.moe_ffn_hidden_size,
            "shared_ffn": args.moe_shared_expert_intermediate_size or 0,
        }
    if args.multi_latent_attention:
        dims |= {
            "q_latent": args.q_lora_rank or 0,
            "kv_latent": args.kv_lora_rank,
            "kv_latent_and_rope": args.kv_lora_rank + args.qk_pos_emb_head_dim,
            "latent_q": heads * (args.qk_head_dim + args.qk_pos_emb_head_dim),
            "latent_kv": heads * (args.qk_head_dim + args.v_head_dim),
            "latent_out": heads * args.v_head_dim,
        }
    return dims


def table(args: Namespace) -> list[Weight]:
    """Every weight of the whole model that `args` describe: embedding, layer by layer, head, multi-token prediction.

    Two weights have the same name where the files hold a parameter twice: the copies come later.
    """
    dims, family = dimensions(args), families.for_args(args)
    if args.mtp_num_layers and not family.mtp_rows:
        raise GrpoError(f"model family {family.name} has no multi-token prediction: leave --mtp-num-layers out")
    before, layered, after = _around_layers(family.rows)

    def weights(rows: Sequence[ParameterMapping], kind: int | None, **numbers: int) -> Iterator[Weight]:
        for row in rows:
            if not row.when(args, kind):
                continue
            if "{expert}" in row.mcore:
                yield from (row.weight(dims, expert=expert, **numbers) for expert in range(args.num_experts))
            else:
                yield row.weight(dims, **numbers)

    out = list(weights(before, None))
    for layer in range(args.num_layers):
        out += weights(layered, layer, layer=layer)
    out += weights(after, None)
    for mtp in range(args.mtp_num_layers or 0):  # each holds a layer like the decoder's last
        last, number = args.num_layers - 1, args.num_layers + mtp
        out += weights(family.mtp_rows, last, layer=number, mtp=mtp)
        inner = [replace(row, mcore=row.mcore.replace("decoder.layers.{layer}", _MTP_LAYER)) for row in layered]
        out += weights(inner, last, layer=number, mtp=mtp)
    return out


def named_weights(model_chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """(name in the whole model, tensor) for each weight of this rank's chunks; writing to the tensor changes the model.

    Weights are the parameters, and the routers' expert biases, which are buffers. Wrappers and fused norms are undone,
    experts come one by one under their numbers in the whole model. The copies of tied embeddings and of the embedding
    for multi-token prediction, which the last pipeline stage keeps, go by the embedding's own name.
    """
    for wrapped in model_chunks:
        chunk: Any = wrapped
        while hasattr(chunk, "module"):  # DistributedDataParallel, Float16Module
            chunk = chunk.module
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            yield from _canonical(chunk, name, parameter.detach())
        for name, buffer in chunk.named_buffers():
            if name.endswith("router.expert_bias"):
                # Float16Module has rounded it; megatron-core makes it float32 again at the first forward pass only.
                buffer.data = buffer.data.float()
                yield from _canonical(chunk, name, buffer)


def _canonical(chunk: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The name and tensor with layer and experts numbered over the whole model, in the words of the local spec."""
    found = re.match(r"((?:decoder|mtp)\.layers)\.(\d+)\.(transformer_layer\.)?(.+)", name)
    if not found:
        yield name, tensor
        return
    layers, index, inner, rest = found.groups()
    layer: Any = chunk.get_submodule(f"{layers}.{index}")
    prefix = f"{layers}.{layer.layer_number - 1}.{inner or ''}"
    if not rest.startswith("mlp.experts."):
        yield prefix + FUSED_NORMS.get(rest, rest), tensor
        return
    numbers = (layer.transformer_layer if inner else layer).mlp.local_expert_indices
    for place, linear, part in _experts(rest.removeprefix("mlp."), tensor):
        yield f"{prefix}mlp.experts.local_experts.{numbers[place]}.{linear}", part


def _experts(name: str, tensor: Tensor) -> Iterator[tuple[int, str, Tensor]]:
    """(place on this rank, name within the expert, tensor) of the experts that a parameter holds."""
    if found := _SEQUENTIAL.fullmatch(name):
        yield int(found[1]), found[2], tensor
    elif found := _GROUPED.fullmatch(name):
        yield int(found[2]), found[1], tensor
    elif found := _STACKED.fullmatch(name):
        yield from ((place, found[1], part) for place, part in enumerate(tensor))
    else:
        raise GrpoError(
            f"the experts' parameter {name} is of no known kind: give --moe-grouped-gemm, or leave out what replaces it"
        )


def tensor_parallel(weight: Weight) -> tuple[int, int]:
    """(this rank's place, size) of the tensor parallelism that splits a weight: experts have one of their own."""
    if weight.expert is None:
        return (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
    return parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()


def local_weights(model_chunks: Sequence[nn.Module], weights: Sequence[Weight]) -> list[tuple[Weight, Tensor]]:
    """This rank's tensors with the weights of the table that they hold; GrpoError for one unclaimed or misshaped.

    A weight comes twice when this rank has it twice.
    """
    by_name = {weight.name: weight for weight in reversed(weights)}
    local = []
    for name, tensor in named_weights(model_chunks):
        if name not in by_name:
            raise GrpoError(
                f"the model's parameter {name} is not in its family's table: a flag gives the model a part that the "
                f"family does not have"
            )
        weight = by_name[name]
        expected = weight.shard_shape(tensor_parallel(weight)[1])
        if tuple(tensor.shape) != expected:
            raise GrpoError(
                f"the model's parameter {name} has shape {tuple(tensor.shape)}, its family's table says {expected}"
            )
        local.append((weight, tensor))
    return local


def owning_stages(weights: Sequence[Weight], held: Container[str]) -> dict[str, int]:
    """Name -> the first pipeline stage that holds it; one small all-reduce, so every rank must call it.

    `held`: the names of this rank's weights. GrpoError, on every rank, for a weight that no stage holds.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    owners = torch.tensor([stage if weight.name in held else stages for weight in weights], device=device())
    # The ranks that hold the model once between them, experts and all.
    dist.all_reduce(
        owners, op=dist.ReduceOp.MIN, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    )
    for weight, owner in zip(weights, owners.tolist(), strict=True):
        if owner == stages:
            raise GrpoError(
                f"the model has no parameter {weight.name}, which its family's table asks for: a flag leaves a part of "
                f"the model out"
            )
    return {weight.name: owner for weight, owner in zip(weights, owners.tolist(), strict=True)}


def _around_layers(
    rows: Sequence[ParameterMapping],
) -> tuple[list[ParameterMapping], list[ParameterMapping], list[ParameterMapping]]:
    layered = [row for row in rows if "{layer}" in row.mcore]
    first, last = rows.index(layered[0]), rows.index(layered[-1])
    return list(rows[:first]), layered, list(rows[last + 1 :])
