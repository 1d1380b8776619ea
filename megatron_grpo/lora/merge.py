"""Merge an adapter from files into Hugging Face tensors, one tensor at a time, without a model."""

from argparse import Namespace
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_grpo.lora.fp8_base import fp8_weights
from megatron_grpo.lora.layers import scaling
from megatron_grpo.lora.table import pairs
from megatron_grpo.lora.targets import saved_weights
from megatron_grpo.models.fp8_weight import rounded


class Merge:
    """W + s B A of every layer with an adapter; DoRA scales its rows; modules that were trained whole are replaced.

    ``args``: the model's, with the adapter's settings. ``read``: returns a tensor of the adapter by its name, PEFT's
    without the prefix. With --lora-base-dtype fp8, W is what 8 bits leave of the run's weights, which had ``dtype``.
    """

    def __init__(self, args: Namespace, read: Callable[[str], Tensor], dtype: torch.dtype):
        self.read, self.scale, self.dtype = read, scaling(args), dtype
        self.in_8_bits = {name for weight in fp8_weights(args).values() for name in weight.hf}
        self.saved = {name for weight in saved_weights(args) for name in weight.hf}
        self.layers = {list(pair.base.hf)[pair.source]: pair for pair in pairs(args)}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Return the merged tensor of a Hugging Face name, in the tensor's dtype; the sum is rounded once."""
        if name in self.saved:
            return self.read(name).to(tensor.dtype)
        if name in self.in_8_bits:
            tensor = rounded(tensor.to(self.dtype)).to(tensor.dtype)
        if name not in self.layers:
            return tensor
        pair = self.layers[name]
        a, b = (self.read(next(iter(weight.hf))).float() for weight in (pair.a, pair.b))
        whole = torch.addmm(tensor.float(), b, a, alpha=self.scale)
        if pair.m is not None:
            m = self.read(next(iter(pair.m.hf))).float()
            whole *= (m / whole.norm(dim=1))[:, None]
        return whole.to(tensor.dtype)
