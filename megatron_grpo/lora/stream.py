"""Iterate over an adapter, or over the weights merged with it, as full Hugging Face tensors."""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_grpo.lora.attach import adapters, local_adapter
from megatron_grpo.lora.layers import Adapter
from megatron_grpo.lora.table import adapter_table
from megatron_grpo.lora.targets import saved_weights
from megatron_grpo.models.config import params_dtype
from megatron_grpo.weights import model_weights
from megatron_grpo.weights.stream import local_shards, stream_weights


def stream_adapter(model_chunks: Sequence[nn.Module], args: Namespace) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of every matrix, on every rank in the order of `adapter_table`. Collective.

    The names are PEFT's without the prefix ``base_model.model.``: model.layers.0.self_attn.q_proj.lora_A.weight. Every
    rank must iterate to the end. The tensors may be views of the parameters: copy a tensor to keep it. The weights of
    --lora-modules-to-save are not among them.
    """
    local = {weight.name: tensor for weight, tensor in local_adapter(model_chunks)}
    yield from stream_weights(adapter_table(args), local, params_dtype(args))


def stream_saved(model_chunks: Sequence[nn.Module], args: Namespace) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of the weights that are trained whole. Collective, as `stream_adapter`."""
    yield from stream_weights(saved_weights(args), local_shards(model_chunks, args), params_dtype(args))


def stream_merged(model_chunks: Sequence[nn.Module], args: Namespace) -> Iterator[tuple[str, Tensor]]:
    """Yield what `weights.stream.stream_hf` yields, with W + s B A in place of W, without a change of W. Collective."""
    yield from stream_weights(model_weights.table(args), merged_shards(model_chunks, args), params_dtype(args))


def merged_shards(model_chunks: Sequence[nn.Module], args: Namespace) -> Mapping[str, Tensor]:
    """Return this rank's tensors by the names of the family's table, with W + s B A in place of W.

    Each is merged when it is read, in float32, and rounded once.
    """
    places = {
        pairs[0].base.name: (adapter, place)
        for adapter in adapters(model_chunks)
        for place, pairs in enumerate(adapter.experts)
    }
    return _Merged(local_shards(model_chunks, args), places)


class _Merged(Mapping[str, Tensor]):
    """This rank's shards, merged when they are read."""

    def __init__(self, local: Mapping[str, Tensor], places: Mapping[str, tuple[Adapter, int]]):
        self.local, self.places = local, places

    def __getitem__(self, name: str) -> Tensor:
        # Collective with DoRA: row-parallel layers add up their norms. All ranks of a group read in the same order.
        weight = self.local[name]
        if name not in self.places:
            return weight
        adapter, place = self.places[name]
        return merged(weight, adapter, place)

    def __contains__(self, name: object) -> bool:
        return name in self.local  # Mapping's method would merge

    def __iter__(self) -> Iterator[str]:
        return iter(self.local)

    def __len__(self) -> int:
        return len(self.local)


@torch.no_grad()
def merged(weight: Tensor, adapter: Adapter, place: int = 0) -> Tensor:
    """Return the shard W + s B A of a layer, or of its expert number ``place``, in W's dtype; DoRA scales its rows."""
    down, up = adapter.matrices()
    factors = adapter.row_factors(down, up)
    if adapter.grouped:
        down, up, factors = down[place], up[place], None if factors is None else factors[place]
    whole = torch.addmm(weight.float(), up.float(), down.float(), alpha=adapter.scale)
    return (whole if factors is None else whole * factors[:, None]).to(weight.dtype)
