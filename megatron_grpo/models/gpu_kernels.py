"""Triton kernels of the ``local`` layers, where what torch compiles reads and writes the same memory several times.

All of them are limited by memory bandwidth, and read each input and write each output once: `HeadsOfPack` (norms and
rotations of queries and keys), the gradient of `RootMeanSquareNorm`, `swiglu_gradient`, and `sum_rows`. Sums are in
float32.
"""

import torch
import triton
import triton.language as tl
from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

ROWS = 16  # tokens of a program of `HeadsOfPack`
NORM_PROGRAMS = 1024  # each adds the weight's gradient of its rows


class HeadsOfPack(torch.autograd.Function):
    """`self_attention.queries_keys_values` for pairs half a head apart in whole heads of 2^n channels.

    ``apply(heads, weight_q, weight_k, cos, sin, eps, one)``: ``heads`` ``[t, groups, n + 2, d]``, weights of the norms
    ``[d]`` or None, to which ``one`` (0.0 or 1.0) is added, cosines and sines ``[t, 1, 1, d]``.
    """

    @staticmethod
    def forward(ctx, heads, weight_q, weight_k, cos, sin, eps: float, one: float):
        tokens, groups, slots, size = heads.shape
        heads, cos, sin = heads.contiguous(), cos.contiguous(), sin.contiguous()
        queries = heads.new_empty(tokens, groups * (slots - 2), size)
        keys, values = (heads.new_empty(tokens, groups, size) for _ in range(2))
        if tokens:
            _heads[(triton.cdiv(tokens, ROWS), groups * slots)](
                heads, weight_q, weight_k, cos, sin, queries, keys, values,
                tokens, groups, eps, one, slots, size // 2, weight_q is not None, ROWS,
            )  # fmt: skip
        ctx.save_for_backward(heads, weight_q, weight_k, cos, sin)
        ctx.options = eps, one
        return queries, keys, values

    @staticmethod
    def backward(ctx, *grads):
        heads, weight_q, weight_k, cos, sin = ctx.saved_tensors
        eps, one = ctx.options
        tokens, groups, slots, size = heads.shape
        grads = [grad.contiguous() for grad in grads]
        out, blocks = torch.empty_like(heads), triton.cdiv(tokens, ROWS)
        trained = ctx.needs_input_grad[1]
        of_weights = heads.new_empty((blocks, groups, slots, size) if trained else 0, dtype=torch.float32)
        if tokens:
            _heads_gradient[(blocks, groups * slots)](
                heads, weight_q, weight_k, cos, sin, *grads, out, of_weights,
                tokens, groups, eps, one, slots, size // 2, weight_q is not None, trained, ROWS,
            )  # fmt: skip
        if not trained:
            return out, *[None] * 6
        of_queries, of_keys = of_weights[:, :, :-2].sum((0, 1, 2)), of_weights[:, :, -2].sum((0, 1))
        return out, of_queries.to(weight_q.dtype), of_keys.to(weight_k.dtype), *[None] * 4


@triton.jit
def _head(queries, keys, values, tokens, groups, slots: tl.constexpr, half: tl.constexpr, rows: tl.constexpr):
    """Return the head and the tokens of a program.

    These are the head's number in its group, the tokens ``[rows, 1]``, a mask of those that exist, the channels of a
    half ``[1, half]``, the offsets of the first half in ``heads``, and pointers to it in queries, keys or values.
    """
    slot = tl.program_id(1)
    group, number = slot // slots, slot % slots
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None].to(tl.int64)
    column = tl.arange(0, half)[None, :]
    at = row * (groups * slots * 2 * half) + slot * 2 * half + column
    if number == slots - 1:
        there = values + row * (groups * 2 * half) + group * 2 * half + column
    elif number == slots - 2:
        there = keys + row * (groups * 2 * half) + group * 2 * half + column
    else:
        query = group * (slots - 2) + number
        there = queries + row * (groups * (slots - 2) * 2 * half) + query * 2 * half + column
    return number, row, row < tokens, column, at, there


@triton.jit
def _heads(
    heads, weight_q, weight_k, cos, sin, queries, keys, values,
    tokens, groups, eps, one, slots: tl.constexpr, half: tl.constexpr, normed: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    number, row, inside, column, at, there = _head(queries, keys, values, tokens, groups, slots, half, rows)
    first = tl.load(heads + at, inside, 0.0).to(tl.float32)
    second = tl.load(heads + at + half, inside, 0.0).to(tl.float32)
    if number < slots - 1:
        if normed:
            mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half)
            scale = tl.rsqrt(mean + eps)[:, None]
            weight = weight_k if number == slots - 2 else weight_q
            first = first * scale * (tl.load(weight + column).to(tl.float32) + one)
            second = second * scale * (tl.load(weight + half + column).to(tl.float32) + one)
        angle = row * 2 * half + column
        turned = first * tl.load(cos + angle, inside, 0.0) + second * tl.load(sin + angle, inside, 0.0)
        second = second * tl.load(cos + angle + half, inside, 0.0) + first * tl.load(sin + angle + half, inside, 0.0)
        first = turned
    tl.store(there, first, inside)
    tl.store(there + half, second, inside)


@triton.jit
def _heads_gradient(
    heads, weight_q, weight_k, cos, sin, queries, keys, values, out, of_weights,
    tokens, groups, eps, one,
    slots: tl.constexpr, half: tl.constexpr, normed: tl.constexpr, trained: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    number, row, inside, column, at, there = _head(queries, keys, values, tokens, groups, slots, half, rows)
    first = tl.load(there, inside, 0.0).to(tl.float32)
    second = tl.load(there + half, inside, 0.0).to(tl.float32)
    if number < slots - 1:
        angle = row * 2 * half + column
        turned = first * tl.load(cos + angle, inside, 0.0) + second * tl.load(sin + angle + half, inside, 0.0)
        second = second * tl.load(cos + angle + half, inside, 0.0) + first * tl.load(sin + angle, inside, 0.0)
        first = turned
        if normed:
            x, y = (
                tl.load(heads + at, inside, 0.0).to(tl.float32),
                tl.load(heads + at + half, inside, 0.0).to(tl.float32),
            )
            mean = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * half)
            scale = tl.rsqrt(mean + eps)[:, None]
            x, y = x * scale, y * scale
            if trained:
                program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
                place = of_weights + program * 2 * half + tl.arange(0, half)
                tl.store(place, tl.sum(first * x, 0))
                tl.store(place + half, tl.sum(second * y, 0))
            weight = weight_k if number == slots - 2 else weight_q
            first = first * (tl.load(weight + column).to(tl.float32) + one)
            second = second * (tl.load(weight + half + column).to(tl.float32) + one)
            along = ((tl.sum(first * x, 1) + tl.sum(second * y, 1)) / (2 * half))[:, None]
            first, second = scale * (first - x * along), scale * (second - y * along)
    tl.store(out + at, first, inside)
    tl.store(out + at + half, second, inside)


class RootMeanSquareNorm(torch.autograd.Function):
    """``torch.rms_norm``; its gradients of the input and of the weight come from one pass over both.

    ``apply(x, weight, eps)``: ``[..., h]`` and ``[h]``.
    """

    @staticmethod
    def forward(ctx, x, weight, eps: float):
        out, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        size, trained = len(weight), ctx.needs_input_grad[1]
        rows = x.numel() // size
        x, grad, out = x.contiguous(), grad.contiguous(), torch.empty_like(x)
        programs = min(rows, NORM_PROGRAMS)
        of_weight = x.new_empty((programs, size) if trained else 0, dtype=torch.float32)
        if rows:
            _norm_gradient[(programs,)](
                x, weight, scale, grad, out, of_weight, rows, size, triton.next_power_of_2(size), trained
            )
        return out, of_weight.sum(0).to(weight.dtype) if trained else None, None


@triton.jit
def _norm_gradient(x, weight, scale, grad, out, of_weight, rows, size, width: tl.constexpr, trained: tl.constexpr):
    column = tl.arange(0, width)
    inside = column < size
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32)
    total = tl.zeros([width], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * tl.cast(size, tl.int64) + column
        of_row = tl.load(scale + row)
        normed = tl.load(x + at, inside, 0.0).to(tl.float32) * of_row
        upstream = tl.load(grad + at, inside, 0.0).to(tl.float32)
        if trained:
            total += upstream * normed
        upstream *= factor
        tl.store(out + at, of_row * (upstream - normed * (tl.sum(upstream * normed, 0) / size)), inside)
    if trained:
        tl.store(of_weight + tl.program_id(0) * size + column, total, inside)


def swiglu_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x`` ``[..., 2 f]`` for that of silu(x_1) x_2, ``grad`` ``[..., f]``."""
    x, grad = x.contiguous(), grad.contiguous()
    out, size = torch.empty_like(x), grad.shape[-1]
    if grad.numel():
        _swiglu_gradient[(grad.numel() // size, triton.cdiv(size, 1024))](x, grad, out, size, 1024)
    return out


def _backward(ctx, grad: torch.Tensor) -> tuple:
    return swiglu_gradient(grad, *ctx.saved_tensors), None, None


SwiGLUFunction.backward = staticmethod(_backward)  # that of --bias-activation-fusion


@triton.jit
def _swiglu_gradient(x, grad, out, size, block: tl.constexpr):
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    row = tl.program_id(0).to(tl.int64)
    at = row * 2 * size + column
    first = tl.load(x + at, inside, 0.0).to(tl.float32)
    second = tl.load(x + at + size, inside, 0.0).to(tl.float32)
    upstream = tl.load(grad + row * size + column, inside, 0.0).to(tl.float32)
    gate = tl.sigmoid(first)
    tl.store(out + at, upstream * second * gate * (1 + first * (1 - gate)), inside)
    tl.store(out + at + size, upstream * first * gate, inside)


def sum_rows(x: torch.Tensor, order: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """Return ``[t, ...]``: row i is the sum of the rows order[begins[i]:begins[i + 1]] of ``x`` ``[k, ...]``."""
    x, rows, size = x.contiguous(), len(begins) - 1, x[0].numel()
    out = x.new_empty(rows, *x.shape[1:])
    if out.numel():
        _sum_rows[(rows, triton.cdiv(size, 1024))](x, order, begins, out, size, 1024)
    return out


@triton.jit
def _sum_rows(x, order, begins, out, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    total = tl.zeros([block], tl.float32)
    for number in range(tl.load(begins + row), tl.load(begins + row + 1)):
        total += tl.load(x + tl.load(order + number) * size + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * size + column, total, inside)
