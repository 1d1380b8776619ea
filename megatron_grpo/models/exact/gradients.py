"""Autograd functions with the forward passes of `kernels` and the backward passes of `gpu_kernels`.

They are apart from `layers`, because Triton exists with a GPU only.
"""

from functools import lru_cache

import torch

from megatron_grpo.models.exact import kernels
from megatron_grpo.models.gpu_kernels import HeadsOfPack, RootMeanSquareNorm, norm_gradient, swiglu_gradient


class Norm(RootMeanSquareNorm):
    """`RootMeanSquareNorm` with the forward pass of `kernels.rms_norm`."""

    @staticmethod
    def forward(ctx, x, weight, eps: float):
        out, scale = kernels.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.set_materialize_grads(False)
        return out, x


class AddAndNorm(torch.autograd.Function):
    """``apply(x, residual, weight, eps)``: norm and sum of `kernels.add_and_norm`; one pass makes all gradients."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps: float):
        out, total, scale = kernels.add_and_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    def backward(ctx, grad, of_total):
        total, weight, scale = ctx.saved_tensors
        of_sum, of_weight = norm_gradient(grad, of_total, total, weight, scale, ctx.needs_input_grad[2])
        return of_sum, of_sum, of_weight, None


class SiluAndMul(torch.autograd.Function):
    """``apply(x)``: `kernels.silu_and_mul`."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return kernels.silu_and_mul(x)

    @staticmethod
    def backward(ctx, grad):
        return swiglu_gradient(grad, *ctx.saved_tensors)


class Heads(HeadsOfPack):
    """`HeadsOfPack` with the forward passes of `kernels.head_norm` and `kernels.rotate`.

    ``apply(heads, weight_q, weight_k, positions, table, eps, one)``: those of `HeadsOfPack`, and the positions and the
    table of `kernels.rotate` in place of cosines and sines.
    """

    @staticmethod
    def forward(ctx, heads, weight_q, weight_k, positions, table, eps: float, one: float):
        queries, keys = (
            part if weight is None else kernels.head_norm(part, weight, eps)
            for part, weight in ((heads[:, :, :-2], weight_q), (heads[:, :, -2:-1], weight_k))
        )
        turned = kernels.rotate(queries, keys, positions, table)
        ctx.save_for_backward(heads, weight_q, weight_k, *_of_tokens(positions, table))
        ctx.options = eps, one
        return *turned, heads[:, :, -1].contiguous()


@lru_cache(maxsize=2)  # the layers of a micro-batch share the result
def _of_tokens(positions: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the tokens as `HeadsOfPack` reads them, float32 ``[t, 1, 1, d]`` each."""
    cos, sin = table.index_select(0, positions).unbind(1)
    return torch.cat((cos, cos), -1)[:, None, None], torch.cat((-sin, sin), -1)[:, None, None]
