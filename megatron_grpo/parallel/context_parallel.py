"""Values of a pack's labels, of which each context-parallel rank has computed some, on every rank of the group."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def whole_pack(values: torch.Tensor, own_labels: torch.Tensor, num_labels: int) -> torch.Tensor:
    """``values`` ``[k, l]`` of this rank's labels as ``[k, L]`` of all ``num_labels`` of the pack, in the pack's order.

    ``own_labels`` ``[l]`` are this rank's places among them. Every rank then computes the same loss of the whole pack,
    and its gradient reaches the rank's own labels: added up over ranks, as gradients are, that is the gradient of one
    loss.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    return _WholePack.apply(values, own_labels, num_labels, parallel_state.get_context_parallel_group())


class _WholePack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, own_labels, num_labels, group):
        ctx.save_for_backward(own_labels)
        whole = values.new_zeros(len(values), num_labels).index_copy_(1, own_labels, values)
        dist.all_reduce(whole, group=group)  # each label has one rank: the others add zeros
        return whole

    @staticmethod
    def backward(ctx, gradient):
        (own_labels,) = ctx.saved_tensors
        return gradient.index_select(1, own_labels), None, None, None
