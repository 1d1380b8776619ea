"""``--gradient-accumulation-fusion``: matrix products that add a weight's gradient to megatron-core's gradient buffer.

Without it a product makes the gradient in the weight's dtype, and DDP's hook adds this tensor to the buffer. That is
one more kernel for each weight and micro-batch, and in 16 bits the gradient of each micro-batch is rounded.
megatron-core calls a CUDA extension of apex for this; here torch's product takes its place.
"""

from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left^T right to ``total`` ``[m, n]`` in place: ``left`` is ``[t, m]``, ``right`` ``[t, n]``.

    With a float32 ``total`` and 16-bit factors on a GPU the sums stay in float32.
    """
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    elif total.is_cuda:
        torch.addmm(total, left.T, right, total.dtype, out=total)
    else:
        total.add_(left.T @ right)


def placeholder(weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor in place of the gradient of a weight; the gradient is in the weight's buffer already.

    DDP's hook runs when a gradient arrives, and ignores this one. An embedding that shares the weight adds to it.
    """
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _add(inputs: torch.Tensor, output_gradient: torch.Tensor, total: torch.Tensor) -> None:
    add_product(total, output_gradient, inputs)


layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=_add, wgrad_gemm_accum_fp16=_add)
layers._grad_accum_fusion_available = True
