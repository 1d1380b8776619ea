"""The router of a mixture of experts: megatron-core's, with products that keep float32 in 16-bit tensor cores."""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.models.router_replay import Replay


class Router(TopKRouter):
    """megatron-core's router with two corrections, and a quicker ``--moe-router-dtype fp32``.

    megatron-core's count of tokens per expert fails with a padding mask, and its list of replay records keeps them
    alive after the model is freed.
    """

    def __init__(self, config: TransformerConfig, pg_collection=None, **more: Any):
        super().__init__(config, pg_collection, **more)
        if config.moe_enable_routing_replay:
            RouterReplay.global_router_replay_instances.remove(self.router_replay)
            self.router_replay = Replay(config)

    def gating(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[..., E]`` of the tokens ``x`` ``[..., h]``."""
        bf16 = x.dtype == self.weight.dtype == torch.bfloat16
        if not bf16 or self.config.moe_router_dtype != "fp32" or self.weight.device != x.device:
            return super().gating(x)
        logits = Float32Logits.apply(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)
        return logits if self.bias is None else logits + self.bias.float()

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        mask = None if padding_mask is None else padding_mask[:, None]
        super()._apply_expert_bias(routing_map, padding_mask=mask)


class Float32Logits(torch.autograd.Function):
    """The float32 logits ``[t, E]`` of ``x`` ``[t, h]`` and ``weight`` ``[E, h]``, both bf16.

    megatron-core copies ``x`` to float32 and multiplies without tensor cores. A product of two bf16 numbers is exact in
    float32, in which tensor cores add: the logits are 2e-6 from float64's (8,192 tokens of 2,048 channels, an H200).
    The float32 gradient enters the products as the sum of two bf16 numbers, which keep 16 of its 24 bits; the results
    are rounded to bf16, 8 bits.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _product(x, weight.T)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        high = grad.bfloat16()
        halves = torch.cat([high, (grad - high).bfloat16()], dim=1)
        grad_x = halves @ torch.cat([weight, weight]) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:  # frozen
            return grad_x, None
        return grad_x, _product(halves.T, x).view(2, *weight.shape).sum(0).bfloat16()


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the float32 product of two bf16 matrices."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
