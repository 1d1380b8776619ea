"""Gathering of per-label values over context-parallel ranks, with gradients."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def whole_pack(values: torch.Tensor, own_labels: torch.Tensor, num_labels: int) -> torch.Tensor:
    """Gather ``values`` ``[k, l]`` of this rank's labels to ``[k, L]`` for all ``num_labels`` = L labels of the pack.

    ``own_labels`` ``[l]`` are the indices of this rank's labels in the pack's order. Every rank then computes the same
    loss of the whole pack, and the backward pass keeps only the gradients of the rank's own labels. The sum of the
    gradients over ranks is the gradient of one loss.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    return _WholePack.apply(values, own_labels, num_labels, parallel_state.get_context_parallel_group())


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
