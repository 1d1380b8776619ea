"""The weights of a whole model, from its family's table, and their match with the parameters of a built model."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_grpo.models import gemma4
from megatron_grpo.models.config import has_recurrence, recurrent_sizes
from megatron_grpo.parallel.arguments import query_groups
from megatron_grpo.parallel.initialize import await_ranks
from megatron_grpo.utils.arguments import kept_for_newest
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.kinds import kind_of, tower_shapes
from megatron_grpo.weights import families
from megatron_grpo.weights.parameter_mapping import Dimensions, ParameterMapping, Weight, not_in_the_model, same

# Transformer Engine's layer spec fuses a norm into the linear layer after it; the local spec's names are canonical.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
BUFFERS = ("router.expert_bias", ".layer_scalar")  # ends of the names of weights that are buffers, not trained
_MTP_LAYER = "mtp.layers.{mtp}.transformer_layer"
# Names of expert parameters in megatron-core's SequentialMLP, in Transformer Engine's grouped layers, and in
# models/experts.py, which stacks all experts of a rank.
_SEQUENTIAL = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_GROUPED = re.compile(r"experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_STACKED = re.compile(r"experts\.(linear_fc[12]\.(?:weight|bias))")


def dimensions(args: Namespace) -> Dimensions:
    """Return the sizes, by name, that the shapes and tensor layouts of the tables refer to."""
    head, heads, groups = args.kv_channels, args.num_attention_heads, query_groups(args)
    dims = Dimensions(
        {
            "one": 1,
            "hidden": args.hidden_size,
            "two_hidden": 2 * args.hidden_size,
            "ffn": args.ffn_hidden_size,
            "two_ffn": 2 * args.ffn_hidden_size,
            "head": head,
            "heads": heads,
            "q": head * heads,
            "two_q": 2 * head * heads,
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
    if has_recurrence(args):
        sizes = recurrent_sizes(args)
        v = sizes.heads * sizes.value
        dims |= {
            "linear_key_heads": sizes.groups,
            "linear_value_heads": sizes.heads,
            "linear_two_value_heads": 2 * sizes.heads,
            "linear_qk": sizes.groups * sizes.key,
            "linear_v": v,
            "linear_value_head": sizes.value,
            "linear_qkv": sizes.mixed,
            "linear_qkvz": sizes.mixed + v,
            "linear_projected": sizes.mixed + v + sizes.scalars * sizes.heads,
            "linear_width": sizes.width,
        }
    if args.gemma4_config:
        dims |= gemma4.dimensions(args)
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


def tied_head(args: Namespace) -> tuple[str, str] | None:
    """Return the Hugging Face names of the output layer and of the embedding to which it is tied; None if untied."""
    if args.untie_embeddings_and_output_weights:
        return None
    names = {mapping.mcore: next(iter(mapping.hf)) for mapping in families.for_args(args).mappings}
    return names["output_layer.weight"], names["embedding.word_embeddings.weight"]


@kept_for_newest  # each sync reads it twice, and a mixture of experts has tens of thousands of weights
def table(args: Namespace) -> Sequence[Weight]:
    """Return every weight of the whole model: embedding, layers in order, output layer, vision, multi-token prediction.

    Two weights have the same name where the files store one parameter twice; the duplicates come last.
    """
    dims, family = dimensions(args), families.for_args(args)
    if args.mtp_num_layers and not family.mtp_mappings:
        raise GrpoError(f"model family {family.name} has no multi-token prediction: leave out --mtp-num-layers")
    before, layered, after = _split_at_layers(family.mappings)

    def weights(mappings: Sequence[ParameterMapping], kind: int | None, **numbers: int) -> Iterator[Weight]:
        for mapping in mappings:
            if not mapping.when(args, kind):
                continue
            if "{expert}" in mapping.mcore:
                yield from (mapping.weight(dims, expert=expert, **numbers) for expert in range(args.num_experts))
            else:
                yield mapping.weight(dims, **numbers)

    out = list(weights(before, None))
    for layer in range(args.num_layers):
        out += weights(layered, layer, layer=layer)
    out += weights(after, None)
    if args.vision_config:
        out += [
            Weight(f"vision.tower.{name}", {kind_of(args).file_name(name): shape}, same, None, dims)
            for name, shape in tower_shapes(args).items()
        ]
    for mtp in range(args.mtp_num_layers or 0):  # each contains a layer of the same kind as the decoder's last
        last, number = args.num_layers - 1, args.num_layers + mtp
        out += weights(family.mtp_mappings, last, layer=number, mtp=mtp)
        inner = [
            replace(mapping, mcore=mapping.mcore.replace("decoder.layers.{layer}", _MTP_LAYER))
            for mapping in family.mtp_layer or layered
        ]
        out += weights(inner, last, layer=number, mtp=mtp)
    return tuple(out)


def named_weights(model_chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the whole model, tensor) of each weight on this rank; the tensors share the model's memory.

    The weights are the parameters, and those of `BUFFERS`. Names have no wrapper prefixes,
    fused norms have their unfused names, and experts are yielded one by one with their global numbers. The last
    pipeline stage's copies of the embedding (tied output layer, multi-token prediction) have the embedding's name.
    Adapters (``chunk.lora``) are not among the weights.
    """
    for chunk in map(unwrap_model, model_chunks):
        for name, parameter in chunk.named_parameters():
            if name.startswith("lora."):
                continue
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            yield from canonical(chunk, name, parameter.detach())
        for name, buffer in chunk.named_buffers():
            if name.endswith(BUFFERS):
                yield from canonical(chunk, name, buffer)


def canonical(chunk: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) with global layer and expert numbers and the local spec's parameter names."""
    # The layer within a multi-token-prediction layer is mtp_model_layer in the model, transformer_layer in checkpoints.
    found = re.match(r"((?:decoder|mtp)\.layers)\.(\d+)\.(?:(mtp_model_layer)\.)?(.+)", name)
    if not found:
        yield name, tensor
        return
    layers, index, inner, rest = found.groups()
    layer: Any = chunk.get_submodule(f"{layers}.{index}")
    prefix = f"{layers}.{layer.layer_number - 1}.{'transformer_layer.' if inner else ''}"
    if not rest.startswith("mlp.experts."):
        yield prefix + FUSED_NORMS.get(rest, rest), tensor
        return
    numbers = (getattr(layer, inner) if inner else layer).mlp.local_expert_indices
    for place, linear, part in _experts(rest.removeprefix("mlp."), tensor):
        yield f"{prefix}mlp.experts.local_experts.{numbers[place]}.{linear}", part


def _experts(name: str, tensor: Tensor) -> Iterator[tuple[int, str, Tensor]]:
    """Yield (index on this rank, name within the expert, tensor) for each expert that a parameter contains."""
    if found := _SEQUENTIAL.fullmatch(name):
        yield int(found[1]), found[2], tensor
    elif found := _GROUPED.fullmatch(name):
        yield int(found[2]), found[1], tensor
    elif found := _STACKED.fullmatch(name):
        yield from ((place, found[1], part) for place, part in enumerate(tensor))
    else:
        raise GrpoError(
            f"expert parameter {name} has an unknown name: give --moe-grouped-gemm, or leave out the flag that selects "
            "another implementation of the experts"
        )


def tensor_parallel(weight: Weight) -> tuple[int, int]:
    """Return (this rank, size) of the tensor parallelism that shards a weight; experts have their own."""
    if weight.expert is None:
        return (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
    return parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()


def local_weights(model_chunks: Sequence[nn.Module], weights: Sequence[Weight]) -> list[tuple[Weight, Tensor]]:
    """Return (weight of the table, tensor) for each parameter of this rank.

    A weight is listed twice when this rank has two copies of it. Raises GrpoError for a parameter that is not in the
    table, or has another shape there.
    """
    by_name = {weight.name: weight for weight in reversed(weights)}
    local = []
    for name, tensor in named_weights(model_chunks):
        if name not in by_name:
            raise GrpoError(
                f"the model's parameter {name} is not in its family's table: a flag adds a part to the model that "
                f"the family does not have"
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
    """Return the first pipeline stage that holds each weight, by name. Collective (one small all-reduce).

    `held`: the names of this rank's weights. Raises GrpoError on every rank for a weight that no stage holds.
    """
    await_ranks()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    owners = torch.tensor([stage if weight.name in held else stages for weight in weights], device=device())
    # The ranks of this group together hold every weight of the model, experts included.
    dist.all_reduce(
        owners, op=dist.ReduceOp.MIN, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    )
    for weight, owner in zip(weights, owners.tolist(), strict=True):
        if owner == stages:
            raise not_in_the_model(weight)
    return {weight.name: owner for weight, owner in zip(weights, owners.tolist(), strict=True)}


def _split_at_layers(
    mappings: Sequence[ParameterMapping],
) -> tuple[list[ParameterMapping], list[ParameterMapping], list[ParameterMapping]]:
    """Split a table into the mappings before, of, and after the decoder layers."""
    layered = [mapping for mapping in mappings if "{layer}" in mapping.mcore]
    first, last = mappings.index(layered[0]), mappings.index(layered[-1])
    return list(mappings[:first]), layered, list(mappings[last + 1 :])
