"""RMSNorm for the ``local`` layer spec with sequence parallelism, which megatron-core's wrapper refuses."""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019), built as megatron-core builds its norms.

    With ``--apply-layernorm-1p`` it multiplies by 1 + weight in float32, as Gemma does: in 16 bits 1 + weight would
    lose most of the weight. Under sequence parallelism each tensor-parallel rank has a slice of the tokens, so the
    gradient of the weight is a partial sum; the attribute ``sequence_parallel`` makes megatron-core add these sums.
    """

    before_branch = False
    eps: float

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel
        self.zero_centered = config.layernorm_zero_centered_gamma
        if self.zero_centered:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and torch.is_grad_enabled() and not self.zero_centered and x.dtype == self.weight.dtype:
            from megatron_grpo.models.gpu_kernels import RootMeanSquareNorm  # Triton exists with a GPU only

            out, again = RootMeanSquareNorm.apply(x, self.weight, self.eps)
            if self.before_branch:
                vars(x)["for_residual"] = again
            return out
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


class BranchNorm(RMSNorm):
    """The norm before attention or an MLP: its kernel adds the gradient that comes along the residual connection.

    For this `take_residual` must give the residual addition the input of the norm.
    """

    before_branch = True


class AllHeadsNorm(RMSNorm):
    """The norm of all ``heads`` of a layer together, also of those on other tensor-parallel ranks (MiniMax-M2).

    Every rank holds the weights of all heads, and uses those of its own heads: megatron-core adds the gradients of
    ``q_layernorm`` and ``k_layernorm`` over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, heads: int):
        super().__init__(config, heads * hidden_size, eps)

    def forward(self, x: torch.Tensor, axes: int = 2) -> torch.Tensor:
        """Return queries or keys of this rank, normed; the last ``axes`` of ``x`` are its heads and channels."""
        shape = x.shape[-axes:]
        first = parallel_state.get_tensor_model_parallel_rank() * prod(shape)
        own = self.weight[first : first + prod(shape)].view(shape)
        return _NormAcrossRanks.apply(x, own, self.eps, self.weight.numel())


class _NormAcrossRanks(torch.autograd.Function):
    """x / sqrt(S / n + eps) times ``weight``: S is the sum of squares of a token's n channels on tensor-parallel ranks.

    With r = (S / n + eps)^-1/2 and d = the sum over all ranks of grad * weight * x, the gradient of x is
    grad * weight * r - x * r^3 * d / n. Each rank's loss depends on S, so both passes add over ranks. Only ``x`` and r
    are stored.
    """

    @staticmethod
    def forward(ctx, x, weight, eps, channels):
        wide = x.float()
        r = torch.rsqrt(_sum_over_ranks(wide.square(), weight.dim()) / channels + eps)
        ctx.save_for_backward(x, weight, r)
        ctx.channels = channels
        return (wide * r).type_as(x) * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, r = ctx.saved_tensors
        wide, grad = x.float(), grad.float()
        weighed = grad * weight
        along = _sum_over_ranks(weighed * wide, weight.dim())
        grad_x = weighed * r - wide * (r**3 * along / ctx.channels)
        grad_weight = (grad * wide * r).flatten(0, -weight.dim() - 1).sum(0)
        return grad_x.type_as(x), grad_weight.type_as(weight), None, None


def _sum_over_ranks(values: torch.Tensor, axes: int) -> torch.Tensor:
    """Return the sum over the last ``axes`` and over tensor-parallel ranks, with these axes as 1."""
    total = values.sum(tuple(range(-axes, 0)), keepdim=True)
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def take_residual(x: torch.Tensor) -> torch.Tensor:
    """Return the input ``x`` of a `BranchNorm` as the residual addition must read it."""
    return vars(x).pop("for_residual", x)  # kept, the tensor and its graph would hold each other in memory


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) times ``weight`` ``[h]``, or 1 + ``weight`` if ``zero_centered``: `RMSNorm`."""
    if not zero_centered:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).type_as(x)


def with_post_layernorm(linear: type, norm: Any) -> type:
    """Return a subclass of a row-parallel linear layer with a norm on its output (Gemma 2, GLM-4).

    ``linear`` is a class of either implementation; ``norm`` has the constructor of `RMSNorm`. The norm follows the
    reduction over tensor-parallel ranks.
    """

    class PostNormLinear(linear):
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **more: Any):
            super().__init__(input_size, output_size, config=config, **more)
            self.post_layernorm = norm(config, output_size, config.layernorm_epsilon)
            # A hook, before which an adapter adds to the output of the linear layer (lora/attach.py).
            self.register_forward_hook(lambda _, __, out: (self.post_layernorm(out[0]), out[1]))

    return PostNormLinear
