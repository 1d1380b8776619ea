"""Frozen weights in 8 bits: e4m3 values, and a float32 scale for each block of 128 x 128 elements.

The weight is W[i, j] = values[i, j] * scales[i // 128, j // 128], computed in float32 and rounded once to the model's
dtype. A block's scale is its largest magnitude / 448, e4m3's largest number (DeepSeek-V3, arXiv:2412.19437, section
3.3). The blocks are those of the Hugging Face matrix, of which a rank may hold any rows and columns: a rank's shard
then equals the same part of the whole matrix in every parallel configuration, and a checkpoint that is stored in such
blocks keeps its values.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

BLOCK = 128
VALUES = torch.float8_e4m3fn
LARGEST = torch.finfo(VALUES).max


class Fp8Weight(Tensor):
    """A weight ``[rows, columns]``, or ``[experts, rows, columns]`` of all experts of a rank, stored in 8 bits.

    It is a tensor of the model's dtype that has no memory of its own: an operation on it computes with `dequantized`,
    which lives as long as the operation needs it. A backward pass that has saved the weight dequantizes it again.
    Operations that would write to it raise TypeError.

    ``values``: e4m3, of the weight's shape. ``scales``: float32 ``[(experts,) rows of blocks, columns of blocks]``.
    ``rows`` int32 ``[rows]``, ``columns`` int32 ``[columns]``: the row and the column of blocks that each one is in.
    """

    values: Tensor  # type: ignore[assignment]  # of a sparse tensor a method of this name
    scales: Tensor
    rows: Tensor
    columns: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scales: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype):
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=dtype, device=values.device
        )
        made.values, made.scales, made.rows, made.columns = values, scales, rows, columns
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Fp8Weight({tuple(self.shape)}, {self.dtype})"

    def dequantized(self) -> Tensor:
        """Return the weight as a new tensor of its dtype."""
        weight = self.values.to(self.dtype)  # exact: e4m3 has 3 bits of mantissa
        scales = self.scales.index_select(-2, self.rows)
        # The scales are float32, so torch multiplies in float32 and rounds the product once.
        if weight.shape[-1] == scales.shape[-1] * BLOCK:
            weight.unflatten(-1, (-1, BLOCK)).mul_(scales[..., None])
        else:
            weight.mul_(scales.index_select(-1, self.columns))
        return weight

    def of_experts(self, first: int, last: int) -> "Fp8Weight":
        """Return the weights ``[last - first, rows, columns]`` of some experts; they share the memory."""
        some = slice(first, last)
        return Fp8Weight(self.values[some], self.scales[some], self.rows, self.columns, self.dtype)

    def of_expert(self, place: int) -> "Fp8Weight":
        """Return the weight ``[rows, columns]`` of one expert; it shares the memory."""
        return Fp8Weight(self.values[place], self.scales[place], self.rows, self.columns, self.dtype)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear and isinstance(args[1], cls):
            return _linear(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        aten, first = torch.ops.aten, args[0]
        if function is aten.detach.default:
            return cls(first.values, first.scales, first.rows, first.columns, first.dtype)
        if function is aten.unbind.int and first.dim() == 3 and len(args) == 1:
            return [first.of_expert(place) for place in range(len(first))]
        if function._schema.is_mutable and isinstance(first, cls):
            raise TypeError(f"{function} would write to a weight that is stored in 8 bits")
        args, kwargs = tree_map_only(cls, cls.dequantized, (args, kwargs or {}))
        return function(*args, **kwargs)


class _Linear(torch.autograd.Function):
    """x W^T, which saves W as it is stored; torch's own would save the dequantized matrix."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Fp8Weight) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight.dequantized())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight.dequantized(), None


def _linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    product = _Linear.apply(x, weight)
    return product if bias is None else product + bias


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor with memory: the dequantized one of an `Fp8Weight`, else the tensor itself."""
    return tensor.dequantized() if isinstance(tensor, Fp8Weight) else tensor


def stored(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with the memory of a tensor: the tensor itself, or the parts of one in 8 bits.

    These are `Fp8Weight` and the classes of Transformer Engine, without the latter's scales: a few numbers.
    """
    if isinstance(tensor, Fp8Weight):
        return tensor.values, tensor.scales, tensor.rows, tensor.columns
    if hasattr(tensor, "get_data_tensors"):
        return tuple(part for part in tensor.get_data_tensors() if part is not None)
    return (tensor,)


def block_maxima(weight: Tensor, rows: Tensor, columns: Tensor, blocks: tuple[int, int]) -> Tensor:
    """Return the largest magnitude in each block ``[(experts,) rows of blocks, columns of blocks]`` in float32.

    ``weight``: ``[(experts,) rows, columns]``; ``rows``, ``columns``: `Fp8Weight`'s; ``blocks``: shape of the whole
    matrix's grid. A block of which the weight has no element has 0.
    """
    found = weight.detach().abs().float()
    for axis, number, index in ((-2, blocks[0], rows), (-1, blocks[1], columns)):
        shape = [1] * found.dim()
        shape[axis] = -1
        whole = list(found.shape)
        whole[axis] = number
        found = found.new_zeros(whole).scatter_reduce(axis, index.long().view(shape).expand_as(found), found, "amax")
    return found


def quantized(weight: Tensor, maxima: Tensor, rows: Tensor, columns: Tensor) -> Fp8Weight:
    """Return a weight in 8 bits. ``maxima``: `block_maxima` of the whole matrix; other arguments: `block_maxima`'s.

    Only the columns of blocks that the weight has elements of are kept.
    """
    first, last = int(columns[0]), int(columns[-1])
    # The smallest normal number stands for the scale of zeros.
    scales = (maxima[..., first : last + 1] / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    columns = columns - first
    units = weight.detach().float() / scales.index_select(-2, rows).index_select(-1, columns)
    return Fp8Weight(units.clamp_(-LARGEST, LARGEST).to(VALUES), scales.contiguous(), rows, columns, weight.dtype)


def rounded(matrix: Tensor) -> Tensor:
    """Return a whole Hugging Face matrix ``[out, in]`` as `Fp8Weight` represents it, in its dtype."""
    rows, columns = (torch.arange(size, dtype=torch.int32, device=matrix.device) // BLOCK for size in matrix.shape)
    grid = -(-matrix.shape[0] // BLOCK), -(-matrix.shape[1] // BLOCK)
    return quantized(matrix, block_maxima(matrix, rows, columns, grid), rows, columns).dequantized()
