"""Gradients that a backward pass computes later than the node that needs them, to overlap with other work.

Of the nodes that are ready autograd runs the one that was made last. A node that only makes its gradient at the end of
a backward pass can thus be made early in the forward pass: those made after it, such as a transfer between ranks, run
first.
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
