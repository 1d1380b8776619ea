"""Gradients that a backward pass computes later than it could, while other work, such as a transfer, is under way.

Of the nodes that are ready, autograd runs the one that the forward pass made last. A node that the forward pass makes
early therefore runs after those that it makes later.
"""

from collections.abc import Callable

import torch


class Deferred:
    """A gradient of a tensor: a later node of the forward pass, earlier in the backward pass, sets ``call``."""

    call: Callable[[], torch.Tensor]

    def node(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``; its gradient is the result of ``call``, whatever arrives."""
        return _Identity.apply(x, self)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, deferred: Deferred):
        ctx.deferred = deferred
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, _):
        call = ctx.deferred.call
        del ctx.deferred.call  # with the tensors that it holds
        return call(), None
