"""The way of tokens to their experts and back.

A token's output is the sum of its experts' outputs, its gradient the sum of theirs. megatron-core's dispatchers sum in
the precision of the tokens, with atomic operations; these sum in float32, in the same order in every run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from megatron_grpo.models.row_copies import RowCopies

Map = Callable[[torch.Tensor], torch.Tensor]


class AllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Every rank receives all tokens, and returns for each the sum of its own experts' outputs."""

    routing_map: Any  # bool [t, E], of megatron-core's class; None while no tokens are under way

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gather, self.sum = (partial(function, group=self.tp_ep_group) for function in (_gather, _sum_ranks))

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[t, h]`` and ``[t, E]`` of all ranks, one after the other."""
        self.routing_map = self._of_local_experts(self.gather(self.routing_map))
        # The host reads the counts while the tokens are on their way, and launches what follows.
        self.tokens_per_expert = self.routing_map.sum(0).to("cpu", non_blocking=True)
        self.counted = torch.cuda.current_stream().record_event()
        return tuple(LinearMap.apply(x, self.gather, self.sum) for x in (hidden_states, probs))

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this rank's tokens ``[k, h]`` sorted by expert, their number for each expert, and ``[k]``.

        The last are the probabilities. ``hidden_states`` is ``[t, h]``, ``probs`` ``[t, experts of all ranks]``.
        """
        self.counted.synchronize()
        count = int(self.tokens_per_expert.sum())
        self.copies, probs = _copies_by_expert(self.routing_map, self._of_local_experts(probs), count)
        self.routing_map = None
        return LinearMap.apply(hidden_states, self.copies.copy, self.copies.sum), self.tokens_per_expert, probs

    def _of_local_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns ``[t, E]`` of this rank's experts."""
        return x.narrow(1, self.local_expert_indices[0], self.num_local_experts)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sums ``[t, h]`` of the outputs ``[k, h]`` of this rank's experts for each token."""
        return LinearMap.apply(hidden_states, self.copies.sum, self.copies.copy)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sums of all ranks for this rank's tokens."""
        return LinearMap.apply(hidden_states, self.sum, self.gather)


class AllToAllDispatcher(MoEAlltoAllTokenDispatcher):
    """A rank sends each token to the ranks of its experts, once for each of them."""

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens ``[k, h]`` sorted by expert, and their probabilities ``[k]``."""
        self.hidden_shape, self.probs = hidden_states.shape, probs
        counts = self.preprocess(routing_map)
        if self._sorts_chunks:
            self.chunk_sizes = self.num_global_tokens_per_local_expert  # on the device; a copy on the host replaces it
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        self.copies, probs = _copies_by_expert(routing_map, probs, len(probs) * self.config.moe_router_topk)
        hidden_states = hidden_states.view(-1, self.hidden_shape[-1])
        return LinearMap.apply(hidden_states, self.copies.copy, self.copies.sum), probs

    @property
    def _sorts_chunks(self) -> bool:
        """Whether tokens of several ranks, sorted by rank, go to several experts, without expert tensor parallelism."""
        return self.tp_size == 1 and self.ep_size > 1 and self.num_local_experts > 1

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this rank's tokens ``[k, h]`` sorted by expert, their number for each expert, and ``[k]``.

        megatron-core splits the tokens into a chunk for each rank and expert, and joins them again.
        """
        if self.tp_size > 1:
            return super().dispatch_postprocess(hidden_states, probs)
        for point in ("before_permutation_2", "before_finish"):
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize(point, self.tokens_per_expert)
        if self._sorts_chunks:
            self.sorting = sorted_by_expert(self.chunk_sizes, len(probs))
            hidden_states, probs = (LinearMap.apply(x, *self.sorting) for x in (hidden_states, probs))
        return hidden_states, self.tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the outputs ``[k, h]`` of this rank's experts sorted by the ranks that receive them."""
        if self.tp_size > 1:
            return super().combine_preprocess(hidden_states)
        if not self._sorts_chunks:
            return hidden_states
        return LinearMap.apply(hidden_states, *reversed(self.sorting))

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sums of the outputs ``[k, h]`` for each token, in the shape of the layer's input."""
        return LinearMap.apply(hidden_states, self.copies.sum, self.copies.copy).view(self.hidden_shape)


def replace_dispatchers(model: torch.nn.Module) -> None:
    """Give all layers with experts the dispatchers of this module.

    megatron-core's stay in FP8, for which they pad, and its all-to-all with ``--moe-shared-expert-overlap``: it runs
    the shared experts, too.
    """
    for layer in model.modules():
        if not isinstance(layer, MoELayer) or layer.config.fp8:
            continue
        kind = {
            MoEAllGatherTokenDispatcher: AllGatherDispatcher,
            MoEAlltoAllTokenDispatcher: None if layer.shared_expert_overlap else AllToAllDispatcher,
        }.get(type(layer.token_dispatcher))
        if kind:
            local = layer.num_local_experts, layer.local_expert_indices
            layer.token_dispatcher = kind(*local, config=layer.config, pg_collection=get_default_pg_collection())


def _copies_by_expert(chosen: torch.Tensor, probs: torch.Tensor, count: int) -> tuple[RowCopies, torch.Tensor]:
    """Return the tokens of the experts, in their order, and their probabilities.

    ``chosen`` and ``probs`` are ``[t, E]``; ``count`` is how many are chosen, so that the host need not wait for it.
    """
    places = chosen.T.flatten().nonzero_static(size=count)[:, 0]
    return RowCopies(places % len(chosen), len(chosen)), probs.T.flatten().index_select(0, places)


def sorted_by_expert(counts: torch.Tensor, count: int) -> tuple[Map, Map]:
    """Return the maps from rows sorted by rank and expert to rows sorted by expert and rank, and back.

    ``counts`` ``[ranks, E]`` has the rows of each rank for each expert; they are ``count`` together.
    """

    def starts(sizes: torch.Tensor) -> torch.Tensor:
        return (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)

    place = torch.arange(count, device=counts.device)
    moved = starts(counts.T).T - starts(counts)  # by how many rows each chunk moves
    maps = []
    for shift, sizes in ((-moved.T, counts.T), (moved, counts)):
        rows = place + shift.flatten().repeat_interleave(sizes.flatten(), output_size=count)
        maps.append(partial(torch.index_select, dim=0, index=rows))
    return maps[0], maps[1]


class LinearMap(torch.autograd.Function):
    """A linear function of a tensor, and its transpose for the gradient: ``apply(x, function, transpose)``."""

    @staticmethod
    def forward(ctx, x, function: Map, transpose: Map):
        ctx.transpose = transpose
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.transpose(grad), None, None


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows ``[ranks * t, ...]`` of all ranks' ``[t, ...]``; the transpose of `_sum_ranks`."""
    if group.size() == 1:
        return x
    gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _sum_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Add all ranks' ``[ranks * t, ...]``, and return this rank's rows ``[t, ...]`` of the sum.

    In contrast to a reduce-scatter, each summand is sent in its own precision, and their float32 sum is rounded once.
    """
    if group.size() == 1:
        return x
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received.unflatten(0, (group.size(), -1)).sum(0)
