"""Triton kernels of `planned`, which read the bytes once; torch's operations write them, too."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

ROWS = 8  # of a program of `_row_sums`
ROWS_OF_PIECE = 1024  # that a program of `_piece_sums` adds up at a time
PROGRAMS = 256  # of `_differing` for each pair
WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # by their bytes


def checksums(words: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `planned.checksums` [pieces, 2] of a buffer of int64 ``words`` [rows, 2^n]."""
    height, width = words.shape
    of_rows, found = words.new_empty(2, height), words.new_empty(rows.shape[1], 2)
    if height:
        _row_sums[(triton.cdiv(height, ROWS),)](words, of_rows, height, ROWS, width, num_warps=8)
    if len(found):
        _piece_sums[(len(found),)](of_rows, rows, found, height, len(found), ROWS_OF_PIECE, num_warps=4)
    return found


def differing(targets: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `planned.differing` [n]: of whole pieces by words of up to 8 bytes, of others by elements."""
    found = torch.zeros(len(targets), PROGRAMS, dtype=torch.int8, device=targets[0].device)
    kinds, read = defaultdict(list), []
    shape: Sequence[int]
    strides: Sequence[int]
    for number, pair in enumerate(zip(targets, parts, strict=True)):
        if whole := pair[0].is_contiguous() and pair[1].is_contiguous():
            one, other, nbytes = pair[0].data_ptr(), pair[1].data_ptr(), pair[0].nbytes
            numbers = one | other | nbytes | 8
            word = numbers & -numbers  # the largest power of two that divides them
            shape, strides = (1, nbytes // word), (0, 1, 0, 1)
        else:
            flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in pair]
            read += flat  # some are copies
            one, other = (tensor.data_ptr() for tensor in flat)
            word, shape, strides = pair[0].itemsize, flat[0].shape, (*flat[0].stride(), *flat[1].stride())
        kinds[word, whole].append((number, one, other, *shape, *strides))
    for (word, whole), pairs in kinds.items():
        table = torch.tensor(pairs, device="cpu", pin_memory=found.is_cuda).to(found.device, non_blocking=True)
        tile = (1, 1024) if whole else (32, 32)
        _differing[(len(pairs), PROGRAMS)](table, found, WORDS[word], *tile, whole, PROGRAMS, num_warps=4)
    return found.any(1)


@triton.jit(do_not_specialize=["height"])
def _row_sums(words, of_rows, height, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write the sum of each row, and that with the factors of the columns."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = row < height
    word = tl.load(words + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=inside[:, None], other=0)
    word ^= (word >> 33) & 0x7FFFFFFF
    tl.store(of_rows + row, tl.sum(word, 1), mask=inside)
    tl.store(of_rows + height + row, tl.sum(word * (2 * column + 1).to(tl.int64)[None, :], 1), mask=inside)


@triton.jit(do_not_specialize=["height", "pieces"])
def _piece_sums(of_rows, rows, found, height, pieces, ROWS: tl.constexpr):
    """Write the two sums of a piece."""
    piece = tl.program_id(0)
    first, last = tl.load(rows + piece), tl.load(rows + pieces + piece)
    by_row, by_column = tl.zeros([ROWS], tl.int64), tl.zeros([ROWS], tl.int64)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < last
        by_row += tl.load(of_rows + row, mask=inside, other=0) * (2 * (row - first) + 1)
        by_column += tl.load(of_rows + height + row, mask=inside, other=0)
    tl.store(found + 2 * piece, tl.sum(by_row))
    tl.store(found + 2 * piece + 1, tl.sum(by_column))


@triton.jit
def _differing(
    table, found, WORD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, COUNT: tl.constexpr
):
    """Write whether a program has seen other words in its tiles of a pair.

    A row of ``table``: the pair's number, two addresses, height and width, two strides of each tensor.
    """
    of_pair, program = table + tl.program_id(0) * 9, tl.program_id(1)
    one = tl.load(of_pair + 1).to(tl.pointer_type(WORD))
    other = tl.load(of_pair + 2).to(tl.pointer_type(WORD))
    height, width = tl.load(of_pair + 3), tl.load(of_pair + 4)
    across = tl.cdiv(width, WIDTH)
    differs = tl.zeros([ROWS, WIDTH], tl.int32)
    for tile in range(program, tl.cdiv(height, ROWS) * across, COUNT):
        row = (tile // across * ROWS + tl.arange(0, ROWS))[:, None]
        column = (tile % across * WIDTH + tl.arange(0, WIDTH))[None, :]
        inside = (row < height) & (column < width)
        if WHOLE:
            here, there = column, column
        else:
            here = row * tl.load(of_pair + 5) + column * tl.load(of_pair + 6)
            there = row * tl.load(of_pair + 7) + column * tl.load(of_pair + 8)
        words = tl.load(one + here, mask=inside, other=0)
        differs |= (words != tl.load(other + there, mask=inside, other=0)).to(tl.int32)
    tl.store(found + tl.load(of_pair) * COUNT + program, tl.max(tl.max(differs, 1), 0).to(tl.int8))
