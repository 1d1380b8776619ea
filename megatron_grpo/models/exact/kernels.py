"""Triton kernels that trainer and engine both call, so that both compute the same bits (``--exact-log-probs``).

No row of a result depends on the number of other rows, nor on what they hold: a program reduces each row in an order
that its size alone fixes. Sums are in float32, and each result is rounded once. The compiler may not fuse products
and sums, because it could choose differently for two callers. What reduces reads contiguous tensors, or heads of
a known alignment: the layout of a reduction follows the alignment of its loads.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

KEYS = 64  # of a product of queries and keys
ROWS = 32  # of such a product: some queries times the heads of a group, if these are not more
STEP_ROWS = 16  # of one in a decode step, which has one query a sequence: the least that there can be
NORM_WIDTH = 1024  # numbers of a program of the norm, at least
ALIGNED = 16  # numbers: heads begin at multiples
LOG2_E = 1.4426950408889634
ADDRESS = 256  # bytes; a larger power of two in an address makes no difference to cuBLASLt
LOGITS_ROW = 64  # the row of a matrix of logits begins at a multiple of this
LOGITS = 8192  # of a program of `token_log_probs`
IDS = 32  # tokens of a row: a program of `_token_log_probs` takes so many at a time
PLAIN = {"enable_fp_fusion": False}


class Tile(NamedTuple):
    """The part of a product that a program of `linear` computes."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


WIDE = Tile(128, 256, 64, 8, 3)  # of many rows: training and prompts
NARROW = Tile(64, 64, 128, 4, 4)  # of few rows: decode steps
FEW_PROGRAMS = 128  # of wide tiles: fewer leave a part of a GPU idle
STEP, MOST_ROWS = 128, 2**14  # rows that torch's product is tried with
MOST_BYTES = 2**29  # of a result of it; there are two, which vLLM's profile of its memory takes from the cache
LEAST_NUMBERS = 2**20  # of 16 bits that a trial compares: sums in another order differ in one of some 5,000
MOST_TIMED_ROWS = 512  # products of more rows fill a GPU in any tiles
SLOW = 2  # times as long as our product: torch's took 7 times with 64 rows of 4,864 numbers on an H200


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    multiple: int = 1,
) -> torch.Tensor:
    """Return ``x`` ``[..., k]`` times ``weight`` ``[n, k]`` transposed, plus ``bias`` ``[n]``: ``[..., n]``.

    The result is of the dtype of ``x`` or of ``dtype``. Its rows begin at multiples of ``multiple`` numbers. Rows for
    which torch's product has the same bits are computed by it (`rows_of_torch`), if rows follow one another.
    """
    depth, columns = x.shape[-1], len(weight)
    flat = x.reshape(-1, depth).contiguous()
    rows = len(flat)
    if not weight.is_contiguous():
        raise ValueError(f"a weight of strides {weight.stride()} is not contiguous")
    width = triton.cdiv(columns, multiple) * multiple
    parts: tuple[int, ...] = ()
    if tile is None and width == columns and all(_as_tried(tensor) for tensor in (flat, weight, bias)):
        parts = products_of_torch(rows, _tried(columns, depth, bias is not None, dtype or x.dtype, flat.device))
    made = flat.new_empty(max(rows, sum(parts)), width, dtype=dtype)[:, :columns]
    first = 0
    for number in parts:
        last = first + number
        _torch_linear(_more_rows(flat[first:last], number), weight, bias, made[first:last])
        first = last
    made = made[:rows]
    if first < rows:
        _own_linear(flat[first:], weight, bias, made[first:], tile)
    return made.view(*x.shape[:-1], columns)


@functools.lru_cache(maxsize=2**14)
def products_of_torch(rows: int, equal: frozenset[int]) -> tuple[int, ...]:
    """Return the rows of torch's products, numbers of ``equal``, that compute the first or all of ``rows`` rows.

    The last product may compute some rows more: it takes the least number that is large enough, of at most `STEP` - 1
    rows more.
    """
    numbers: list[int] = []
    while rows > 0:
        number = min((number for number in equal if 0 <= number - rows < STEP), default=0)
        number = number or max((number for number in equal if number < rows and number % STEP == 0), default=0)
        if not number:
            break
        numbers.append(number)
        rows -= number
    return tuple(numbers)


def _more_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ``rows`` rows, the first ones those of ``x`` ``[t, k]``, and others of any numbers.

    These are what follows in the storage of ``x``; a storage that is too small is copied into a larger one.
    """
    count, depth = x.shape
    if count == rows:
        return x
    if (x.storage_offset() + rows * depth) * x.element_size() <= x.untyped_storage().nbytes():
        return x.as_strided((rows, depth), (depth, 1))
    larger = x.new_empty(rows, depth)
    larger[:count] = x
    return larger


def _empty(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return an empty tensor of ``shape`` like ``x``; its storage has `STEP` rows more, for `_more_rows`."""
    count = math.prod(shape)
    return x.new_empty(count + STEP * math.prod(shape[1:]))[:count].view(shape)


def _as_tried(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor begins as those of `rows_of_torch` do: cuBLASLt chooses a kernel by addresses, too."""
    return tensor is None or tensor.data_ptr() % ADDRESS == 0


_KNOWN: dict[tuple, frozenset[int]] = {}


def _tried(*kind: Any) -> frozenset[int]:
    """Return `rows_of_torch` of a kind of product; none in Triton's interpreter and if a graph is captured first."""
    if kind not in _KNOWN:
        if kind[-1].type != "cuda" or torch.cuda.is_current_stream_capturing():
            return frozenset()
        _KNOWN[kind] = rows_of_torch(*kind)
    return _KNOWN[kind]


def rows_of_torch(columns: int, depth: int, biased: bool, dtype: torch.dtype, device: torch.device) -> frozenset[int]:
    """Return the numbers of rows with which torch's product, which is mostly faster, has the bits of ours.

    They are tried, with random numbers: all up to 16, those of CUDA graphs, and multiples of `STEP`. Small numbers are
    tried with several products. From now on torch divides no sum among programs, so that a few programs can have all
    the work of a long sum: numbers with which its product is `SLOW` are left out.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False, False
    most = min(MOST_ROWS, max(512, MOST_BYTES // (columns * dtype.itemsize) // STEP * STEP))
    generator = torch.Generator(device).manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    x, weight = draw(most, depth), draw(columns, depth).mul_(depth**-0.5)
    bias = draw(columns) if biased else None
    expected, made = (torch.empty(most, columns, dtype=dtype, device=device) for _ in range(2))
    _own_linear(x, weight, bias, expected)
    least = 1 if dtype == torch.float32 else min(most, LEAST_NUMBERS // columns)
    found = set()
    for number in {*range(1, 17), *range(16, 513, 8), *range(STEP, most + 1, STEP)}:
        rows = max(1, least // number) * number
        for first in range(0, rows, number):
            part = slice(first, first + number)
            if _as_tried(x[part]) and _as_tried(made[part]):
                _torch_linear(x[part], weight, bias, made[part])
            else:
                out = made.new_empty(number, columns)
                _torch_linear(x[part].clone(), weight, bias, out)
                made[part] = out
        if torch.equal(made[:rows], expected[:rows]):
            found.add(number)
    return frozenset(
        number for number in found if number > MOST_TIMED_ROWS or not _is_slow(x[:number], weight, bias, made[:number])
    )


def _is_slow(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> bool:
    """Return whether torch's product takes more than `SLOW` times as long as ours; both are written to ``out``."""
    torchs, ours = (_seconds(product, x, weight, bias, out) for product in (_torch_linear, _own_linear))
    return torchs > SLOW * ours


def _seconds(product: Callable[..., None], x: torch.Tensor, *others: torch.Tensor | None) -> float:
    """Return the seconds of five products, the lesser of two measurements; 0 in Triton's interpreter."""
    if not x.is_cuda:  # also beside a GPU
        return 0.0
    times = []
    for _ in range(2):
        product(x, *others)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(5):
            product(x, *others)
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3)
    return min(times)


def _torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if out.dtype != x.dtype:
        torch.mm(x, weight.T, out_dtype=out.dtype, out=out)
        if bias is not None:
            out += bias
    elif bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def _own_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile | None = None
) -> None:
    rows, (columns, depth) = len(x), weight.shape
    if tile is None:
        few = _programs(WIDE, rows, columns) < FEW_PROGRAMS
        tile = NARROW if few and narrow_agrees(x.device) else WIDE
    _linear[(_programs(tile, rows, columns),)](
        x, weight, out if bias is None else bias, out, rows, columns, depth, out.stride(0),
        BIASED=bias is not None, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        EVEN=depth % tile.depth == 0, num_warps=tile.warps, num_stages=tile.stages, **PLAIN,
    )  # fmt: skip


def _programs(tile: Tile, rows: int, columns: int) -> int:
    return triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)


@functools.cache
def narrow_agrees(device: torch.device) -> bool:
    """Return whether products in `NARROW` tiles equal those in `WIDE` ones on this kind of device.

    They do where a tensor core's instruction adds its products to the sum in one order for each size. Otherwise decode
    steps take wide tiles. Call it before a CUDA graph is captured.
    """
    if device.type != "cuda":  # Triton's interpreter
        return True
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(192, 1920, generator=generator, device="cpu").to(device, torch.bfloat16)
    weight = torch.randn(320, 1920, generator=generator, device="cpu").to(device, torch.bfloat16)
    one, other = (linear(x, weight, dtype=torch.float32, tile=tile) for tile in (NARROW, WIDE))
    return bool(torch.equal(one, other))


@triton.jit(do_not_specialize=["rows", "columns"])
def _linear(
    x, weight, bias, out, rows, columns, depth, out_row, BIASED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    of_rows, of_columns = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    # Eight blocks of rows take the same columns one after the other: these stay in the cache.
    band = 8 * of_columns
    first = tl.program_id(0) // band * 8
    height = tl.minimum(of_rows - first, 8)
    inner = tl.program_id(0) % band
    row = (first + inner % height) * ROWS + tl.arange(0, ROWS)
    column = inner // height * COLUMNS + tl.arange(0, COLUMNS)
    of_row = tl.where(row < rows, row, 0).to(tl.int64)[:, None] * depth
    of_column = tl.where(column < columns, column, 0).to(tl.int64)[None, :] * depth
    at = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        here = start + at
        if EVEN:
            left, right = tl.load(x + of_row + here[None, :]), tl.load(weight + of_column + here[:, None])
        else:
            left = tl.load(x + of_row + here[None, :], mask=here[None, :] < depth, other=0.0)
            right = tl.load(weight + of_column + here[:, None], mask=here[:, None] < depth, other=0.0)
        total = tl.dot(left, right, total)
    if BIASED:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x r times ``weight`` ``[h]``, like ``x`` ``[..., h]``, and r = 1 / sqrt(mean(x^2) + eps), ``[..., 1]``."""
    return _norm(x.contiguous(), weight, eps)


def add_and_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `rms_norm` of x + ``residual`` ``[..., h]``, rounded, this sum, and the second result of `rms_norm`."""
    x, residual = x.contiguous(), residual.contiguous()
    if residual.dtype != x.dtype:
        raise ValueError(f"a residual of {residual.dtype} and a branch of {x.dtype} have no common sum")
    total = torch.empty_like(x)
    out, scale = _norm(x, weight, eps, residual, total)
    return out, total, scale


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm`; with ``residual`` that of the sum, which is written to ``total``.

    Both run one binary, because another one could sum a row in another order.
    """
    size = x.shape[-1]
    rows, width = x.numel() // size, triton.next_power_of_2(size)
    out, scale = _empty(x, *x.shape), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    together = max(1, NORM_WIDTH // width)
    if rows:
        _rms_norm[(triton.cdiv(rows, together),)](
            x, x if residual is None else residual, weight, out, out if total is None else total, scale, rows, size,
            eps, int(residual is not None), ROWS=together, WIDTH=width, num_warps=4, **PLAIN,
        )  # fmt: skip
    return out, scale


@triton.jit(do_not_specialize=["rows", "add"])
def _rms_norm(
    x, residual, weight, out, total, scale, rows, size, eps, add, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = row.to(tl.int64)[:, None] * size + column[None, :]
    inside = (row < rows)[:, None] & (column < size)[None, :]
    adding = inside & (add != 0)
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    more = tl.load(residual + at, mask=adding, other=0.0).to(tl.float32)
    values = tl.where(adding, values + more, values)  # -0.0 + 0.0 is 0.0
    rounded = values.to(out.dtype.element_ty)
    tl.store(total + at, rounded, mask=adding)
    values = rounded.to(tl.float32)
    root = tl.rsqrt(tl.sum(values * values, 1) / size + eps)
    factor = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + at, (values * root[:, None] * factor[None, :]).to(out.dtype.element_ty), mask=inside)
    tl.store(scale + row, root, mask=row < rows)


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of each head of ``x`` ``[t, a, b, d]``, contiguous; ``weight`` ``[d]``.

    Heads need not be contiguous, as parts of a projection are not: they begin at multiples of `ALIGNED` numbers, which
    the kernel knows in any case.
    """
    tokens, groups, slots, size = x.shape
    strides, apart = x.stride(), x.data_ptr() % (ALIGNED * x.element_size())
    if apart or strides[3] != 1 or any(stride % ALIGNED for stride in strides[:3]):
        raise ValueError(f"heads of strides {strides}, {apart} bytes after a multiple of {ALIGNED} numbers")
    out = x.new_empty(x.shape)
    rows, together = tokens * groups * slots, max(1, NORM_WIDTH // size)
    if rows:
        _head_norm[(triton.cdiv(rows, together),)](
            x, weight, out, rows, groups * slots, slots, *(stride // ALIGNED for stride in strides[:3]), eps,
            ROWS=together, SIZE=size, UNIT=ALIGNED, num_warps=4, **PLAIN,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "heads", "slots", "of_token", "of_group", "of_slot"])
def _head_norm(
    x, weight, out, rows, heads, slots, of_token, of_group, of_slot, eps, ROWS: tl.constexpr, SIZE: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)[None, :]
    head = row % heads
    begin = (row // heads * of_token + head // slots * of_group + head % slots * of_slot) * UNIT
    inside = (row < rows)[:, None]
    values = tl.load(x + begin[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    factor = tl.load(weight + column).to(tl.float32)
    tl.store(
        out + row[:, None] * SIZE + column, (values * root[:, None] * factor).to(out.dtype.element_ty), mask=inside
    )


def rotation_table(inv_freq: torch.Tensor, positions: int, factor: float, device: torch.device) -> torch.Tensor:
    """Return cosines and sines of the angles of all positions, times ``factor``: float32 ``[positions, 2, d / 2]``.

    They are computed in float64 on the CPU from ``inv_freq`` ``[d / 2]``: all processes get the same ones.
    """
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inv_freq.cpu().double()
    return (torch.stack([angles.cos(), angles.sin()], 1) * factor).float().to(device)


def rotate(
    queries: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both parts ``[t, a, b, d]`` rotated by the angles of ``positions`` ``[t]``: ``[t, a * b, d]`` each.

    A pair of channels lies half a head apart: (x cos - y sin, y cos + x sin).
    """
    tokens, size = len(queries), queries.shape[3]
    parts = queries, keys
    if any(part.stride(3) != 1 for part in parts):
        raise ValueError(f"heads of strides {queries.stride()} and {keys.stride()} are not contiguous")
    heads = [part.shape[1] * part.shape[2] for part in parts]
    turned, other = (part.new_empty(tokens, count, size) for part, count in zip(parts, heads, strict=True))
    if tokens:
        _rotate[(tokens,)](
            queries, keys, positions, table, turned, other, *queries.stride()[:3], *keys.stride()[:3], *heads,
            queries.shape[2], keys.shape[2], QUERIES=triton.next_power_of_2(heads[0]),
            KEYS=triton.next_power_of_2(heads[1]), HALF=size // 2, num_warps=4, **PLAIN,
        )  # fmt: skip
    return turned, other


@triton.jit
def _rotate(
    queries, keys, positions, table, turned, other, query_token, query_group, query_slot, key_token, key_group,
    key_slot, of_queries, of_keys, query_slots, key_slots, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = table + tl.load(positions + token).to(tl.int64) * 2 * HALF + tl.arange(0, HALF)[None, :]
    cos, sin = tl.load(angle), tl.load(angle + HALF)
    query, key = queries + token * query_token, keys + token * key_token
    first, second = turned + token * of_queries * 2 * HALF, other + token * of_keys * 2 * HALF
    _turn(query, first, cos, sin, query_group, query_slot, of_queries, query_slots, QUERIES, HALF)
    _turn(key, second, cos, sin, key_group, key_slot, of_keys, key_slots, KEYS, HALF)


@triton.jit
def _turn(source, target, cos, sin, of_group, of_slot, heads, slots, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Rotate the ``heads`` of a token at ``source``, into ``target``."""
    channel, head = tl.arange(0, HALF)[None, :], tl.arange(0, HEADS)[:, None]
    source += head // slots * of_group + head % slots * of_slot + channel
    first = tl.load(source, mask=head < heads, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=head < heads, other=0.0).to(tl.float32)
    target += head * 2 * HALF + channel
    tl.store(target, (first * cos - second * sin).to(target.dtype.element_ty), mask=head < heads)
    tl.store(target + HALF, (second * cos + first * sin).to(target.dtype.element_ty), mask=head < heads)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(x_1) x_2 ``[..., f]`` of ``x`` ``[..., 2 f]``."""
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = _empty(x, *x.shape[:-1], size)
    if out.numel():
        _silu_and_mul[(out.numel() // size, triton.cdiv(size, 1024))](x, out, size, BLOCK=1024, num_warps=4, **PLAIN)
    return out


@triton.jit
def _silu_and_mul(x, out, size, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (gate * tl.sigmoid(gate) * other).to(out.dtype.element_ty), mask=inside)


def token_log_probs(logits: torch.Tensor, token_ids: torch.Tensor, sums: torch.Tensor | None = None) -> torch.Tensor:
    """Return log softmax(``logits`` ``[t, v]``) at ``token_ids`` ``[t, n]``: float32 ``[t, n]``.

    ``sums`` are `log_sums` of the logits, if they are known.
    """
    logits = whole_rows(logits)
    token_ids = token_ids.to(torch.int64).contiguous()
    found = logits.new_empty(token_ids.shape, dtype=torch.float32)
    if len(logits):
        sums = log_sums(logits) if sums is None else sums
        parts = sums.shape[1]
        _token_log_probs[(len(logits),)](
            logits, sums, token_ids, found, logits.stride(0) // LOGITS_ROW, parts, token_ids.shape[1],
            UNIT=LOGITS_ROW, PARTS=triton.next_power_of_2(parts), IDS=IDS, num_warps=1, **PLAIN,
        )  # fmt: skip
    return found


def log_sums(logits: torch.Tensor) -> torch.Tensor:
    """Return of each `LOGITS` numbers of a row of `whole_rows` the largest, and the sum of exp(number - largest).

    ``logits`` ``[t, v]``; float32 ``[t, parts, 2]``. One program for a whole row would leave a GPU idle with the few
    rows of a decode step.
    """
    rows, columns = logits.shape
    sums = logits.new_empty(rows, triton.cdiv(columns, LOGITS), 2, dtype=torch.float32)
    if rows:
        _log_sums[(rows, sums.shape[1])](
            logits, sums, logits.stride(0) // LOGITS_ROW, columns, sums.shape[1], UNIT=LOGITS_ROW, COLUMNS=LOGITS,
            num_warps=8, **PLAIN,
        )  # fmt: skip
    return sums


def whole_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return ``logits`` ``[t, v]``, copied if its rows do not begin at multiples of `LOGITS_ROW` numbers."""
    if _has_whole_rows(logits):
        return logits
    rows, columns = logits.shape
    return logits.new_empty(rows, triton.cdiv(columns, LOGITS_ROW) * LOGITS_ROW)[:, :columns].copy_(logits)


def _has_whole_rows(logits: torch.Tensor) -> bool:
    """Return whether each row ``[v]`` begins at a multiple of `LOGITS_ROW` numbers, and its storage ends at one.

    Rows of an expanded tensor share their numbers, and have no width of their own.
    """
    width = logits.stride(0)
    end = (logits.storage_offset() + len(logits) * width) * logits.element_size()
    in_rows = logits.stride(1) == 1 and width % LOGITS_ROW == 0 and width >= logits.shape[1] and _as_tried(logits)
    return in_rows and end <= logits.untyped_storage().nbytes()


@triton.jit(do_not_specialize=["width", "columns", "parts"])
def _log_sums(logits, sums, width, columns, parts, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the largest of some logits of a row, and the sum of their exponentials over that of the largest."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    # Whole units are read: a mask that could end anywhere would make each number a load of its own.
    values = tl.load(logits + row * width * UNIT + column, mask=column < width * UNIT, other=0.0).to(tl.float32)
    values = tl.where(column < columns, values, float("-inf"))
    most = tl.max(values, 0)
    total = tl.sum(tl.exp(values - tl.where(most == float("-inf"), 0.0, most)), 0)
    place = sums + (row * parts + part) * 2
    tl.store(place, most)
    tl.store(place + 1, total)


@triton.jit(do_not_specialize=["width", "parts", "count"])
def _token_log_probs(
    logits, sums, token_ids, found, width, parts, count, UNIT: tl.constexpr, PARTS: tl.constexpr, IDS: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    place = sums + (row * parts + part) * 2
    each = tl.load(place, mask=part < parts, other=float("-inf"))
    most = tl.max(each, 0)
    totals = tl.load(place + 1, mask=part < parts, other=0.0)
    log_sum = tl.log(tl.sum(totals * tl.exp(each - tl.where(most == float("-inf"), 0.0, most)), 0))
    for first in range(0, count, IDS):
        number = first + tl.arange(0, IDS)
        held = number < count
        token = tl.load(token_ids + row * count + number, mask=held, other=0)
        own = tl.load(logits + row * width * UNIT + token, mask=held, other=0.0).to(tl.float32)
        tl.store(found + row * count + number, own - most - log_sum, mask=held)


class Pages(NamedTuple):
    """Where the keys of each sequence lie: key i of sequence s in block ``table[s, i // size]``, at place i % size.

    ``starts`` int32 ``[n + 1]``: the first query of each sequence; its queries are the last of its tokens, of which
    there are ``lengths`` int32 ``[n]``. ``table`` int32 ``[n, blocks]``, ``size`` a power of two.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    size: int


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: Pages,
    scale: float,
    out: torch.Tensor | None = None,
    longest: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention ``[t, heads, d]``, and log(sum(e^score)) of each query, float32 ``[heads, t]``.

    ``query`` ``[t, heads, d]``; ``key`` and ``value`` ``[blocks, size, groups, d]`` of equal strides. ``longest``: no
    sequence has more queries; with a few, as in decode steps, a program need not look for its sequence.

    Every query meets its keys in products of `KEYS` of them, from the first on: in a prompt, in a part of one, and in
    a decode step. Products in which other queries of a program see keys and it does not leave its numbers as they are.
    """
    tokens, heads, size = query.shape
    groups = key.shape[2]
    wide = triton.next_power_of_2(heads // groups)
    if key.stride() != value.stride() or key.stride(3) != 1 or query.stride(1) != size or pages.size & (pages.size - 1):
        raise ValueError(
            f"strides {key.stride()}, {value.stride()}, {query.stride()} and blocks of {pages.size} tokens"
        )
    out = _empty(query, tokens, heads, size) if out is None else out
    is_step = longest is not None and longest * wide <= STEP_ROWS and steps_agree(heads, groups, size, query.device)
    return out, _attend(query, key, value, pages, scale, out, longest, STEP_ROWS if is_step else max(ROWS, wide))


def _attend(query, key, value, pages: Pages, scale: float, out, longest: int | None, rows: int) -> torch.Tensor:
    """Write attention into ``out``, in programs of ``rows`` queries and heads; return the logarithms of its sums.

    Programs of two warps multiply by instructions of 16 rows, whatever ``rows`` is; those of four warps and 64 rows
    would take other ones, which add in another order, and a decode step would fill a few of their rows.
    """
    tokens, heads, size = query.shape
    groups, sequences = key.shape[2], len(pages.lengths)
    wide = triton.next_power_of_2(heads // groups)
    queries = rows // wide
    short = longest is not None and longest <= queries
    log_sum = query.new_empty(heads, tokens, dtype=torch.float32)
    if tokens:
        blocks = sequences if short else tokens // queries + sequences
        _attention[(groups * blocks,)](  # a second number of programs may not exceed 65,535
            query, key, value, pages.table, pages.starts, pages.lengths, out, log_sum, groups, sequences, int(short),
            scale * LOG2_E, pages.size.bit_length() - 1, tokens, query.stride(0), out.stride(0), key.stride(0),
            key.stride(1), key.stride(2), pages.table.stride(0), HEADS=heads // groups, WIDE=wide, QUERIES=queries,
            D=size, KEYS=KEYS, num_warps=2, num_stages=3, **PLAIN,
        )  # fmt: skip
    return log_sum


@functools.cache
def steps_agree(heads: int, groups: int, size: int, device: torch.device) -> bool:
    """Return whether attention in programs of `STEP_ROWS` rows equals that of more rows on this device.

    Another compiler could choose other instructions, and Triton's interpreter adds in another order. Call it before a
    CUDA graph is captured.
    """
    if device.type != "cuda" or triton.next_power_of_2(heads // groups) > STEP_ROWS:
        return False
    generator, tokens = torch.Generator().manual_seed(0), 2048
    sequences = max(tokens, LEAST_NUMBERS // (heads * size))
    q, k, v = (
        torch.randn(count, of_token, size, generator=generator, device="cpu").to(device, torch.bfloat16)
        for count, of_token in ((sequences, heads), (tokens, groups), (tokens, groups))
    )
    numbers = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    table = torch.arange(tokens, dtype=torch.int32, device=device).expand(sequences, tokens)
    pages = Pages(numbers, numbers[:-1] % tokens + 1, table, 1)
    for dtype in (torch.float32, q.dtype):  # of another last digit in float32 only one in 2^16 shows in 16 bits
        outs = [torch.empty_like(q, dtype=dtype) for _ in range(2)]
        sums = [
            _attend(q, k[:, None], v[:, None], pages, size**-0.5, out, 1, rows)
            for out, rows in zip(outs, (ROWS, STEP_ROWS), strict=True)
        ]
        if not (torch.equal(*outs) and torch.equal(*sums)):
            return False
    return True


@triton.jit(do_not_specialize=["groups", "sequences", "short", "shift", "tokens", "table_row"])
def _attention(
    query, key, value, table, starts, lengths, out, log_sum, groups, sequences, short, scale, shift, tokens,
    query_token, out_token, key_block, key_token, key_group, table_row, HEADS: tl.constexpr, WIDE: tl.constexpr,
    QUERIES: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    group, block = tl.program_id(0) % groups, tl.program_id(0) // groups
    # Sequence s has the blocks from starts[s] // QUERIES + s on: the last one that begins at or before this block. Of
    # short sequences each has the block of its number. `short` is no constant: one binary has the bits of all steps.
    low, high = tl.where(short != 0, block + 1, 0), tl.where(short != 0, block + 1, sequences)
    while low < high:
        middle = (low + high) // 2
        begins = tl.load(starts + middle) // QUERIES + middle
        if begins <= block:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    first = tl.where(short != 0, 0, (block - begin // QUERIES - sequence) * QUERIES)
    if first >= count:
        return
    length = tl.load(lengths + sequence)
    row = tl.arange(0, QUERIES * WIDE)
    own, head = first + row // WIDE, row % WIDE
    real = (own < count) & (head < HEADS)
    last = length - count + own  # the last key that a query sees
    end = tl.minimum(length, length - count + first + QUERIES)
    d, ahead = tl.arange(0, D), tl.arange(0, KEYS)
    token = (begin + own).to(tl.int64)
    channel = (group * HEADS + head)[:, None] * D + d[None, :]
    queries = tl.load(query + token[:, None] * query_token + channel, mask=real[:, None], other=0.0)
    of_sequence = table + tl.cast(sequence, tl.int64) * table_row
    inner = (1 << shift) - 1
    peak = tl.full([QUERIES * WIDE], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * WIDE], tl.float32)
    weighted = tl.zeros([QUERIES * WIDE, D], tl.float32)
    for start in tl.range(0, end, KEYS):
        at = start + ahead
        held = at < end
        number = tl.load(of_sequence + (at >> shift), mask=held, other=0).to(tl.int64)
        place = number * key_block + (at & inner) * key_token + group * key_group
        keys = tl.load(key + place[:, None] + d[None, :], mask=held[:, None], other=0.0)
        values = tl.load(value + place[:, None] + d[None, :], mask=held[:, None], other=0.0)
        scores = tl.where(at[None, :] <= last[:, None], tl.dot(queries, tl.trans(keys)) * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights, keep = tl.exp2(scores - higher[:, None]), tl.exp2(peak - higher)
        total = total * keep + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(values.dtype), values, weighted * keep[:, None])
        peak = higher
    result = weighted / total[:, None]
    tl.store(out + token[:, None] * out_token + channel, result.to(out.dtype.element_ty), mask=real[:, None])
    log_base_2 = peak + tl.log2(total)
    tl.store(log_sum + (group * HEADS + head).to(tl.int64) * tokens + token, log_base_2 / 1.4426950408889634, mask=real)
