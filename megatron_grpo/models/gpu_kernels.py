"""Triton kernels of the ``local`` layers, where what torch compiles reads and writes the same memory several times.

All of them are limited by memory bandwidth, and read each input and write each output once: `HeadsOfPack` (norms and
rotations of queries and keys), the gradient of `RootMeanSquareNorm`, `swiglu_gradient`, and `sum_rows`. Sums are in
float32.
"""

import math

import torch
import triton
import triton.language as tl

from megatron_grpo.patches import megatron_core as core

HEADS = 4096  # numbers of a head's tokens in a program of `HeadsOfPack`
NORM_PROGRAMS = 1024  # each adds the weight's gradient of its rows


class HeadsOfPack(torch.autograd.Function):
    """`self_attention.queries_keys_values` for pairs half a head apart in whole heads of 2^n channels.

    ``apply(heads, weight_q, weight_k, cos, sin, eps, one)``: ``heads`` ``[t, groups, n + 2, d]``, weights of the norms
    ``[d]`` or None, to which ``one`` (0.0 or 1.0) is added, cosines and sines ``[t, 1, 1, d]``. A program computes the
    heads of one group, for which it reads the angles once.
    """

    @staticmethod
    def forward(ctx, heads, weight_q, weight_k, cos, sin, eps: float, one: float):
        tokens, groups, slots, size = heads.shape
        heads, cos, sin = heads.contiguous(), cos.contiguous(), sin.contiguous()
        queries = heads.new_empty(tokens, groups * (slots - 2), size)
        keys, values = (heads.new_empty(tokens, groups, size) for _ in range(2))
        rows = HEADS // size
        if tokens:
            _heads[(groups, triton.cdiv(tokens, rows))](
                heads, weight_q, weight_k, cos, sin, queries, keys, values,
                tokens, groups, eps, one, slots, size // 2, weight_q is not None, rows,
            )  # fmt: skip
        ctx.save_for_backward(heads, weight_q, weight_k, cos, sin)
        ctx.options = eps, one
        return queries, keys, values

    @staticmethod
    def backward(ctx, *grads):
        heads, weight_q, weight_k, cos, sin = ctx.saved_tensors
        eps, one = ctx.options
        tokens, groups, slots, size = heads.shape
        of_parts = [grad.contiguous() for grad in grads]
        rows = HEADS // size
        out, blocks = torch.empty_like(heads), triton.cdiv(tokens, rows)
        trained = ctx.needs_input_grad[1]
        of_weights = heads.new_empty((blocks * groups, 2, size) if trained else 0, dtype=torch.float32)
        if tokens:
            _heads_gradient[(groups, blocks)](
                heads, weight_q, weight_k, cos, sin, *of_parts, out, of_weights,
                tokens, groups, eps, one, slots, size // 2, weight_q is not None, trained, rows,
            )  # fmt: skip
        if not trained:
            return out, *[None] * 6
        of_queries, of_keys = of_weights.sum(0).to(weight_q.dtype)
        return out, of_queries, of_keys, *[None] * 4


# Numbers of tokens are not specialized: Triton compiles a kernel again, in the middle of a run, for the first number
# that 16 divides.


@triton.jit
def _halves(place, half: tl.constexpr, inside):
    return tl.load(place, inside, 0.0).to(tl.float32), tl.load(place + half, inside, 0.0).to(tl.float32)


@triton.jit
def _head(
    source, target, weight, inside, cos_1, cos_2, sin_1, sin_2,
    eps, one, half: tl.constexpr, normed: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads ``[rows, d]`` at ``source``, into ``target``; both point at the first halves."""
    first, second = _halves(source, half, inside)
    if normed:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half) + eps)[:, None]
        column = tl.arange(0, half)[None, :]
        first *= scale * (tl.load(weight + column).to(tl.float32) + one)
        second *= scale * (tl.load(weight + half + column).to(tl.float32) + one)
    tl.store(target, first * cos_1 + second * sin_1, inside)
    tl.store(target + half, second * cos_2 + first * sin_2, inside)


@triton.jit(do_not_specialize=["tokens"])
def _heads(
    heads, weight_q, weight_k, cos, sin, queries, keys, values,
    tokens, groups, eps, one, slots: tl.constexpr, half: tl.constexpr, normed: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    row = (tl.program_id(1) * rows + tl.arange(0, rows))[:, None].to(tl.int64)
    inside, column, size = row < tokens, tl.arange(0, half)[None, :], 2 * half
    cos_1, cos_2 = _halves(cos + row * size + column, half, inside)
    sin_1, sin_2 = _halves(sin + row * size + column, half, inside)
    source = heads + (row * groups + group) * slots * size + column
    query = queries + (row * groups + group) * (slots - 2) * size + column
    for number in range(slots - 2):
        _head(
            source + number * size, query + number * size, weight_q, inside, cos_1, cos_2, sin_1, sin_2,
            eps, one, half, normed,
        )  # fmt: skip
    source += (slots - 2) * size
    at = (row * groups + group) * size + column
    _head(source, keys + at, weight_k, inside, cos_1, cos_2, sin_1, sin_2, eps, one, half, normed)
    tl.store(values + at, tl.load(source + size, inside), inside)
    tl.store(values + at + half, tl.load(source + size + half, inside), inside)


@triton.jit
def _head_gradient(
    source, upstream, target, weight, inside, cos_1, cos_2, sin_1, sin_2,
    eps, one, half: tl.constexpr, normed: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the heads at ``source`` to ``target``; return the parts of the weight's gradient."""
    grad_1, grad_2 = _halves(upstream, half, inside)
    first, second = grad_1 * cos_1 + grad_2 * sin_2, grad_2 * cos_2 + grad_1 * sin_1
    of_first, of_second = first, second
    if normed:
        x, y = _halves(source, half, inside)
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * half) + eps)[:, None]
        x, y = x * scale, y * scale
        of_first, of_second = first * x, second * y
        column = tl.arange(0, half)[None, :]
        first *= tl.load(weight + column).to(tl.float32) + one
        second *= tl.load(weight + half + column).to(tl.float32) + one
        along = ((tl.sum(first * x, 1) + tl.sum(second * y, 1)) / (2 * half))[:, None]
        first, second = scale * (first - x * along), scale * (second - y * along)
    tl.store(target, first, inside)
    tl.store(target + half, second, inside)
    return of_first, of_second


@triton.jit(do_not_specialize=["tokens"])
def _heads_gradient(
    heads, weight_q, weight_k, cos, sin, queries, keys, values, out, of_weights,
    tokens, groups, eps, one,
    slots: tl.constexpr, half: tl.constexpr, normed: tl.constexpr, trained: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    row = (tl.program_id(1) * rows + tl.arange(0, rows))[:, None].to(tl.int64)
    inside, column, size = row < tokens, tl.arange(0, half)[None, :], 2 * half
    cos_1, cos_2 = _halves(cos + row * size + column, half, inside)
    sin_1, sin_2 = _halves(sin + row * size + column, half, inside)
    place = (row * groups + group) * slots * size + column
    query = queries + (row * groups + group) * (slots - 2) * size + column
    total_1, total_2 = tl.zeros([rows, half], tl.float32), tl.zeros([rows, half], tl.float32)
    for number in range(slots - 2):
        of_first, of_second = _head_gradient(
            heads + place + number * size, query + number * size, out + place + number * size, weight_q, inside,
            cos_1, cos_2, sin_1, sin_2, eps, one, half, normed,
        )  # fmt: skip
        total_1 += of_first
        total_2 += of_second
    place += (slots - 2) * size
    at = (row * groups + group) * size + column
    of_first, of_second = _head_gradient(
        heads + place, keys + at, out + place, weight_k, inside,
        cos_1, cos_2, sin_1, sin_2, eps, one, half, normed,
    )  # fmt: skip
    tl.store(out + place + size, tl.load(values + at, inside), inside)
    tl.store(out + place + size + half, tl.load(values + at + half, inside), inside)
    if trained:
        program = of_weights + (tl.program_id(1) * groups + group) * 2 * size + tl.arange(0, half)
        tl.store(program, tl.sum(total_1, 0))
        tl.store(program + half, tl.sum(total_2, 0))
        tl.store(program + size, tl.sum(of_first, 0))
        tl.store(program + size + half, tl.sum(of_second, 0))


class RootMeanSquareNorm(torch.autograd.Function):
    """``torch.rms_norm`` of ``x``, and ``x`` again for what else reads it; one pass over memory makes all gradients.

    ``apply(x, weight, eps)``: ``[..., h]`` and ``[h]``. The gradient of the second result, if any, is added to that of
    ``x``, which autograd would do in one more pass.
    """

    @staticmethod
    def forward(ctx, x, weight, eps: float):
        out, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.set_materialize_grads(False)
        return out, x

    @staticmethod
    def backward(ctx, grad, residual):
        x, weight, scale = ctx.saved_tensors
        return *norm_gradient(grad, residual, x, weight, scale, ctx.needs_input_grad[1]), None


def norm_gradient(
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    trained: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of ``x`` and of a trained ``weight`` for that of its norm, ``grad``; ``residual`` is added.

    ``scale`` float32 ``[..., 1]``: 1 / sqrt(mean(x^2) + eps).
    """
    size = len(weight)
    rows = x.numel() // size
    x, grad, out = x.contiguous(), grad.contiguous(), torch.empty_like(x)
    residual = None if residual is None else residual.contiguous()
    programs = min(rows, NORM_PROGRAMS)
    of_weight = x.new_empty((programs, size) if trained else 0, dtype=torch.float32)
    if rows:
        _norm_gradient[(programs,)](
            x, weight, scale, grad, residual, out, of_weight, rows, size, triton.next_power_of_2(size), trained,
            residual is not None,
        )  # fmt: skip
    return out, of_weight.sum(0).to(weight.dtype) if trained else None


@triton.jit(do_not_specialize=["rows"])
def _norm_gradient(
    x, weight, scale, grad, residual, out, of_weight,
    rows, size, width: tl.constexpr, trained: tl.constexpr, added: tl.constexpr,
):  # fmt: skip
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
        of_x = of_row * (upstream - normed * (tl.sum(upstream * normed, 0) / size))
        if added:
            of_x += tl.load(residual + at, inside, 0.0).to(tl.float32)
        tl.store(out + at, of_x, inside)
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


def replace_swiglu_gradient() -> None:
    """Compute the gradient of --bias-activation-fusion by `swiglu_gradient`."""
    core.SWIGLU_GRADIENT.install(staticmethod(_backward))


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
    x, rows, size = x.contiguous(), len(begins) - 1, math.prod(x.shape[1:])
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
