"""Balancing of the experts' load in an update: what its micro-batches have in common, and the expert biases.

`begin_update` precedes the forward passes of an update, `next_micro_batch` each of them, and `update_expert_biases`
follows the optimizer's step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model

from megatron_grpo.data.pack import IGNORED_LABEL, Pack
from megatron_grpo.models.config import trains_mtp
from megatron_grpo.models.router import PackTokens, Router, UpdateSize
from megatron_grpo.utils.device import device


def active_losses(config: TransformerConfig) -> dict[str, float]:
    """Return the coefficients that are not 0 of the losses of --moe-router-load-balancing-type."""
    if config.num_moe_experts is None:
        return {}
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], np.atleast_1d(coefficients)
    return {kind: value for kind, value in zip(kinds, coefficients, strict=True) if kind != "none" and value > 0}


def _has_losses(config: TransformerConfig) -> bool:
    return bool(active_losses(config) or config.moe_z_loss_coeff)


def next_micro_batch(chunk: torch.nn.Module, pack: Pack) -> None:
    """Prepare the routers of ``chunk`` for the forward pass of ``pack``."""
    config = get_model_config(chunk)
    if _has_losses(config) or config.moe_router_enable_expert_bias:
        tokens = PackTokens.of(config, pack)
        for router in routers(chunk):
            router.next_micro_batch(tokens)


def end_of_pass(model: Sequence[torch.nn.Module]) -> None:
    """Forget the packs of a pass over all micro-batches."""
    for router in routers(*model):
        router.end_of_pass()


def begin_update(
    packs: Sequence[Pack], model: Sequence[torch.nn.Module], count: Callable[[list[Pack]], object]
) -> None:
    """Give the routers the size of the update over all ranks' ``packs``, and its frequencies for global_aux_loss.

    This loss needs f_i of the whole update before the first micro-batch. ``count`` is a forward pass over packs with
    the present weights, for which the packs have no labels: no earlier pass has both these weights and these tokens.
    Collective.
    """
    config = get_model_config(model[0])
    if not _has_losses(config):
        return
    own = routers(*model)
    size = _size(packs, config.mtp_num_layers or 0)
    for router in own:
        router.update = size
        router.balance_loss.zero_()
    if "global_aux_loss" not in active_losses(config):
        return
    for router in own:
        router.counted = torch.zeros_like(router.local_tokens_per_expert)
    with torch.no_grad():
        count([_without_labels(pack) for pack in packs])
    for router, counts in zip(own, _of_all_ranks([cast(torch.Tensor, router.counted) for router in own]), strict=True):
        router.frequencies = (counts.double() / counts.sum().clamp(min=1)).float()
        router.counted = None


def keep_counts(model: Sequence[torch.nn.Module]) -> None:
    """Keep the counts of an update, which megatron-core sets to 0 at the end of the backward passes."""
    for router in routers(*model):
        router.tokens_of_update.copy_(router.local_tokens_per_expert)


def update_expert_biases(model: Sequence[torch.nn.Module]) -> None:
    """Raise the biases of experts with fewer tokens than the mean, and lower the others (arXiv:2408.15664).

    megatron-core does so before the optimizer's step, also in an update that is then skipped. Collective.
    """
    config = get_model_config(model[0])
    if not config.moe_router_enable_expert_bias or not config.moe_router_bias_update_rate:
        return
    own = routers(*model)
    for router, counts in zip(own, _of_all_ranks([router.tokens_of_update for router in own]), strict=True):
        below = torch.sign(counts.sum() - len(counts) * counts)  # of integers: exact
        router.expert_bias += config.moe_router_bias_update_rate * below


def mean_loss(model: Sequence[torch.nn.Module], num_microbatches: int) -> float | None:
    """Return the load-balancing loss of an update without coefficients, mean over layers and kinds; None without one.

    Collective.
    """
    losses = active_losses(get_model_config(model[0]))
    if not losses:
        return None
    own = routers(*model)
    loss = sum((router.balance_loss for router in own), torch.zeros((), device=device()))
    sums = torch.stack([loss, torch.full_like(loss, len(own))])
    dist.all_reduce(sums)
    total, count = sums.tolist()
    # Each rank has a summand of the loss, and the ranks of a pipeline stage have the same layers.
    layers = count / ranks_of_stage().size()
    return total / parallel_state.get_data_parallel_world_size() / num_microbatches / layers / len(losses)


def counting(chunk: torch.nn.Module) -> bool:
    """Return whether the present forward pass counts the tokens of the experts for `begin_update`."""
    return any(router.counted is not None for router in routers(chunk))


def routers(*model: torch.nn.Module) -> list[Router]:
    """Return the routers of these chunks, also those of multi-token-prediction layers that are trained."""
    found = []
    for chunk in map(unwrap_model, model):
        parts = [chunk.decoder, *([chunk.mtp] if chunk.mtp_process and trains_mtp(chunk.config) else [])]
        found += [module for part in parts for module in part.modules() if isinstance(module, Router)]
    return found


def ranks_of_stage() -> dist.ProcessGroup:
    """Return the ranks of this pipeline stage, which have the same routers and together all tokens of an update."""
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def _of_all_ranks(counts: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the sums ``[E]`` over all ranks of the pipeline stage, one for each router."""
    if not counts:
        return counts
    total = torch.stack(counts)
    dist.all_reduce(total, group=ranks_of_stage())
    return total.unbind()


def _size(packs: Sequence[Pack], mtp_layers: int) -> UpdateSize:
    """Return the tokens, sequences and micro-batches of all ranks' packs. Collective."""
    whole = [pack.sequence_lengths for pack in packs if pack.cp_rank == 0]
    lengths = np.concatenate([np.zeros(0, np.int64), *whole])
    rest = np.maximum(lengths - np.arange(1 + mtp_layers)[:, None], 0)
    filled = np.full(len(rest), sum(own.any() for own in whole))
    sums = torch.from_numpy(np.stack([rest.sum(1), (rest > 0).sum(1), filled])).to(device())
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    tokens, sequences, (micro_batches, *_) = sums.tolist()
    scale = len(packs) * parallel_state.get_data_parallel_world_size()
    return UpdateSize(tokens, sequences, micro_batches, scale)


def _without_labels(pack: Pack) -> Pack:
    """Return a pack without labels: the output layer computes nothing."""
    none = np.zeros(0, np.int64)
    return replace(
        pack,
        labels=np.full_like(pack.labels, IGNORED_LABEL),
        own_labels=none,
        label_positions=none,
        first_labels=None,
        token_index=none,
        completion=none,
        of_labels={},
        further_labels=None if pack.further_labels is None else pack.further_labels[:, :0],
        further_in_loss=None if pack.further_in_loss is None else pack.further_in_loss[:, :0],
    )
