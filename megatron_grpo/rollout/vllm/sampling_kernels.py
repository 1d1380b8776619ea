"""Sampling of tokens from logits: one block of random bits gives the noise of four tokens.

vLLM's kernel computes the four words of a block for each token and uses one of them: with a vocabulary of 152k that
takes longer than to read the logits.
"""

import torch
import triton
import triton.language as tl

QUARTER = 1024  # tokens that a program takes at a time, four times


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return a token of each row of ``logits`` ``[t, v]``, which have been divided by the temperature: int64 ``[t]``.

    ``temperatures`` and ``seeds`` are those of requests, ``slots`` ``[t]`` the request of each row, below 0 for none.
    A row of temperature 0 has its largest logit. Seed and position decide the noise: -log(E) of each token, with E
    distributed exponentially (Gumbel), added to its logit.
    """
    rows, columns = logits.shape
    parts = triton.cdiv(columns, 4 * QUARTER)
    best, tokens = logits.new_empty(rows, parts, dtype=torch.float32), slots.new_empty(rows, parts, dtype=torch.int32)
    found = slots.new_empty(rows, dtype=torch.int64)
    if rows:
        _best_of_part[(rows, parts)](
            logits, slots.contiguous(), temperatures, seeds, positions.contiguous(), best, tokens, logits.stride(0),
            columns, parts, QUARTER=QUARTER, num_warps=4,
        )  # fmt: skip
        _best_of_row[(rows,)](best, tokens, found, parts, PARTS=triton.next_power_of_2(parts), num_warps=1)
    return found


@triton.jit
def _noise(bits):
    """Return -log(E) for 32 random bits; the smallest E, which decide, have all their digits."""
    bits = bits.to(tl.uint32, bitcast=True)
    high, low = (bits >> 16).to(tl.int32).to(tl.float32), (bits & 0xFFFF).to(tl.int32).to(tl.float32)
    u = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10  # 2^-16, 2^-32
    series = 1.0 / 8.0  # of -log(1 - u) = u + u^2 / 2 + ...; what is left out is below 2^-19 of it where u < 1/4
    series = 1.0 / 7.0 + u * series
    series = 1.0 / 6.0 + u * series
    series = 1.0 / 5.0 + u * series
    series = 1.0 / 4.0 + u * series
    series = 1.0 / 3.0 + u * series
    series = 1.0 / 2.0 + u * series
    series = u * (1.0 + u * series)
    return -tl.log(tl.where(u < 0.25, series, -tl.log(tl.maximum(1.0 - u, 5.9604645e-08))))  # 2^-24


@triton.jit
def _better(row, first, bits, columns, strength, best, token, QUARTER: tl.constexpr):
    """Return the larger of ``best`` and the tokens from ``first`` on, and which one that is."""
    column = first + tl.arange(0, QUARTER)
    logits = tl.load(row + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    logits += strength * _noise(bits)  # which is finite
    most, place = tl.max(logits, 0, return_indices=True)
    return tl.maximum(best, most), tl.where(most > best, first + place, token)


@triton.jit(do_not_specialize=["stride", "columns", "parts"])
def _best_of_part(
    logits, slots, temperatures, seeds, positions, best, tokens, stride, columns, parts, QUARTER: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    held = slot >= 0
    strength = tl.where(tl.load(temperatures + slot, mask=held, other=0.0) != 0, 1.0, 0.0)
    key = tl.randint(tl.load(seeds + slot, mask=held, other=0), tl.load(positions + row))
    first, second, third, fourth = tl.randint4x(key, part * QUARTER + tl.arange(0, QUARTER))
    start, source = part * 4 * QUARTER, logits + row * stride
    most, token = _better(source, start, first, columns, strength, float("-inf"), start, QUARTER)
    most, token = _better(source, start + QUARTER, second, columns, strength, most, token, QUARTER)
    most, token = _better(source, start + 2 * QUARTER, third, columns, strength, most, token, QUARTER)
    most, token = _better(source, start + 3 * QUARTER, fourth, columns, strength, most, token, QUARTER)
    tl.store(best + row * parts + part, most)
    tl.store(tokens + row * parts + part, token)


@triton.jit(do_not_specialize=["parts"])
def _best_of_row(best, tokens, found, parts, PARTS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    _, place = tl.max(
        tl.load(best + row * parts + part, mask=part < parts, other=float("-inf")), 0, return_indices=True
    )
    tl.store(found + row, tl.load(tokens + row * parts + place).to(tl.int64))
