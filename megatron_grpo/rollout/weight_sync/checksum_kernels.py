"""Triton kernels of `checksums`, which read a buffer once; torch's operations read and write it nine times."""

import torch
import triton
import triton.language as tl

ROWS = 8  # of a program of `_row_sums`
ROWS_OF_PIECE = 1024  # that a program of `_piece_sums` adds up at a time


def checksums(words: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `planned.checksums` [pieces, 2] of a buffer of int64 ``words`` [rows, 2^n]."""
    height, width = words.shape
    of_rows, found = words.new_empty(2, height), words.new_empty(rows.shape[1], 2)
    if height:
        _row_sums[(triton.cdiv(height, ROWS),)](words, of_rows, height, ROWS, width, num_warps=8)
    if len(found):
        _piece_sums[(len(found),)](of_rows, rows, found, height, len(found), ROWS_OF_PIECE, num_warps=4)
    return found


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
