"""A family's table joined with a built model: global names, shapes, and which pipeline stage holds what."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_grpo.cpu_backend import device
from megatron_grpo.errors import GrpoError
from megatron_grpo.weights import families
from megatron_grpo.weights.families.common import query_groups
from megatron_grpo.weights.layout import Row, Weight

# Transformer Engine's layer spec fuses a norm into the linear layer behind it; the local spec's names are canonical.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def dimensions(args: Namespace) -> dict[str, int]:
    """The sizes that the tables' shapes and layouts are spelled in."""
    head, groups = args.kv_channels, query_groups(args)
    return {
        "hidden": args.hidden_size,
        "ffn": args.ffn_hidden_size,
        "head": head,
        "q": head * args.num_attention_heads,
        "kv": head * groups,
        "groups": groups,
        "vocab": args.vocab_size,
        "padded_vocab": args.padded_vocab_size,
    }


def table(args: Namespace) -> list[Weight]:
    """Every weight of the whole model that `args` describe, in the order of the family's table, layer by layer."""
    dims = dimensions(args)
    rows = [row for row in families.for_args(args).rows if args.untie_embeddings_and_output_weights or not row.untied]
    before, layered, after = _around_layers(rows)
    return [
        *(row.weight(dims) for row in before),
        *(row.weight(dims, layer) for layer in range(args.num_layers) for row in layered),
        *(row.weight(dims) for row in after),
    ]


def named_weights(model_chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in the whole model, parameter) for each parameter of this rank's chunks, wrappers and fused norms undone.

    The copy of tied embeddings that the last pipeline stage keeps goes by the embedding's own name.
    """
    for chunk in model_chunks:
        while hasattr(chunk, "module"):  # DistributedDataParallel, Float16Module
            chunk = chunk.module
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, index, rest = name.split(".", 3)
                layer = chunk.decoder.layers[int(index)].layer_number - 1
                name = f"decoder.layers.{layer}.{_FUSED_NORMS.get(rest, rest)}"
            elif name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            yield name, parameter


def local_weights(model_chunks: Sequence[nn.Module], weights: Sequence[Weight]) -> dict[str, nn.Parameter]:
    """named_weights as a dict, each checked against the table: GrpoError for one unclaimed or of another shape."""
    by_name = {weight.name: weight for weight in weights}
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    local = dict(named_weights(model_chunks))
    for name, parameter in local.items():
        if name not in by_name:
            raise GrpoError(
                f"the model's parameter {name} is not in its family's table: a flag gives the model a part that the "
                f"family does not have"
            )
        expected = by_name[name].shard_shape(tp_size)
        if tuple(parameter.shape) != expected:
            raise GrpoError(
                f"the model's parameter {name} has shape {tuple(parameter.shape)}, its family's table says {expected}"
            )
    return local


def owning_stages(weights: Sequence[Weight], local: Mapping[str, Tensor]) -> list[int]:
    """The first pipeline stage that holds each weight; one small all-reduce, so every rank must call it.

    GrpoError, on every rank, for a weight that no stage holds.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    owners = torch.tensor([stage if weight.name in local else stages for weight in weights], device=device())
    dist.all_reduce(owners, op=dist.ReduceOp.MIN, group=parallel_state.get_pipeline_model_parallel_group())
    for weight, owner in zip(weights, owners.tolist(), strict=True):
        if owner == stages:
            raise GrpoError(
                f"the model has no parameter {weight.name}, which its family's table asks for: a flag leaves a part of "
                f"the model out"
            )
    return owners.tolist()


def _around_layers(rows: Sequence[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    layered = [row for row in rows if "{layer}" in row.mcore]
    first, last = rows.index(layered[0]), rows.index(layered[-1])
    return list(rows[:first]), layered, list(rows[last + 1 :])
