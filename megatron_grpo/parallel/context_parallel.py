"""The context-parallel ranks that hold a pack together, and gathering of per-label values over them, with gradients.

These are all ranks of a context-parallel group; with --hybrid-context-parallel, as many neighbours among them as the
pack needs, its degree (`hybrid_schedule`).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def sharing_ranks(degree: int) -> dist.ProcessGroup | None:
    """Return the group of the ``degree`` ranks that hold a pack with this rank; None if it holds the pack alone."""
    if degree == 1:
        return None
    if degree == parallel_state.get_context_parallel_world_size():
        return parallel_state.get_context_parallel_group()
    return parallel_state.get_hybrid_data_context_parallel_groups(group_size=degree)


def place_in_pack(
    own_tokens: int, cu_seqlens: torch.Tensor | Sequence[int], cp_group: dist.ProcessGroup
) -> tuple[int, int]:
    """Return (degree of a pack, number of this rank among those that hold it).

    megatron-core passes its layers no degree, but each of these ranks holds as many tokens: ``own_tokens``, of those of
    all sequences, whose offsets ``cu_seqlens`` ``[n + 1]`` are on the host if ``cp_group`` has more than one rank.
    """
    if cp_group.size() == 1:
        return 1, 0
    degree = int(cu_seqlens[-1]) // own_tokens
    return degree, cp_group.rank() % degree


def whole_pack(
    values: torch.Tensor,
    own_labels: torch.Tensor,
    num_labels: int,
    degree: int,
    first_labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather ``values`` ``[k, l]`` of this rank's labels to ``[k, L]`` for all ``num_labels`` = L labels of the pack.

    ``own_labels`` ``[l]`` are the indices of this rank's labels in the pack's order. Each of the ``degree`` ranks then
    computes the same loss of the whole pack, and the backward pass keeps only the gradients of the rank's own labels.
    The sum of the gradients over ranks is the gradient of one loss. With ``first_labels`` ``[L]`` the ranks have values
    of these labels only, and a label has the value of its first one (`Pack.first_labels`).
    """
    group = sharing_ranks(degree)
    if group is not None:
        values = _WholePack.apply(values, own_labels, num_labels, group)
    elif first_labels is not None:
        values = values.new_zeros(len(values), num_labels).index_copy(1, own_labels, values)
    return values if first_labels is None else values.index_select(1, first_labels)


class _WholePack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, own_labels, num_labels, group):
        ctx.save_for_backward(own_labels)
        whole = values.new_zeros(len(values), num_labels).index_copy_(1, own_labels, values)
        dist.all_reduce(whole, group=group)  # one rank has each label; the others add zeros
        return whole

    @staticmethod
    def backward(ctx, gradient):
        (own_labels,) = ctx.saved_tensors
        return gradient.index_select(1, own_labels), None, None, None
