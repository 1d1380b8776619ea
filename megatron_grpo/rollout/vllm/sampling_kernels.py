"""Sampling of tokens from logits by one random number a row, which the sum of the probabilities passes at the token.

vLLM's kernel adds random noise to each logit and takes the largest: with a vocabulary of 152k the noise takes longer
than to read the logits. The sums are those of the log-probabilities.
"""

import torch
import triton
import triton.language as tl

from megatron_grpo.models.exact import kernels


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a token of each row of ``logits`` ``[t, v]``, which have been divided by the temperature: int64 ``[t]``.

    ``temperatures`` and ``seeds`` are those of requests, ``slots`` ``[t]`` the request of each row, below 0 for none.
    Seed and position decide the random number. A row of temperature 0, or of no request, has its largest logit.
    ``sums`` are `kernels.log_sums` of the logits, if they are known.
    """
    logits = kernels.whole_rows(logits)
    found = slots.new_empty(len(logits), dtype=torch.int64)
    if len(logits):
        sums = kernels.log_sums(logits) if sums is None else sums
        parts = sums.shape[1]
        _sample[(len(logits),)](
            logits, sums, slots.contiguous(), temperatures, seeds, positions.contiguous(), found,
            logits.stride(0) // kernels.LOGITS_ROW, logits.shape[1], parts, UNIT=kernels.LOGITS_ROW,
            COLUMNS=kernels.LOGITS, PARTS=triton.next_power_of_2(parts), num_warps=8,
        )  # fmt: skip
    return found


@triton.jit
def _uniform(seed, position):
    """Return a number between 0 and 1, both excluded, of 52 random bits."""
    high, low, _, _ = tl.randint4x(seed, position)
    high, low = high.to(tl.uint32, bitcast=True).to(tl.float64), (low.to(tl.uint32, bitcast=True) >> 12).to(tl.float64)
    return (high * 1048576.0 + low + 0.5) * 2.220446049250313e-16  # 2^20, 2^-52


@triton.jit
def _first_above(weights, fraction):
    """Return where the running sum of ``weights`` passes this part of their sum, and after which part of the weight.

    The weight there is above 0, if any is.
    """
    place, ends = tl.arange(0, weights.shape[0]), tl.cumsum(weights, 0)
    target = fraction * tl.max(ends, 0)
    last = tl.max(tl.where(weights > 0, place, 0), 0)  # where rounding has left nothing above the target
    first = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), last)
    weight = tl.sum(tl.where(place == first, weights, 0.0), 0)
    before = tl.sum(tl.where(place == first, ends - weights, 0.0), 0)
    return first, tl.maximum((target - before) / weight, 0.0)  # rounding can make it negative


@triton.jit(do_not_specialize=["width", "columns", "parts"])
def _sample(
    logits, sums, slots, temperatures, seeds, positions, found, width, columns, parts, UNIT: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the token of a row: first its part of the row is chosen, then it. Sums are in float64.

    In float32 the sum would not change by tokens of less than 2^-24 of it.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    slot = tl.load(slots + row).to(tl.int64)
    held = slot >= 0
    is_greedy = tl.load(temperatures + slot, mask=held, other=0.0) == 0
    fraction = _uniform(tl.load(seeds + slot, mask=held, other=0), tl.load(positions + row))
    place = sums + (row * parts + part) * 2
    each = tl.load(place, mask=part < parts, other=float("-inf"))
    most, largest = tl.max(each, 0, return_indices=True)
    totals = tl.load(place + 1, mask=part < parts, other=0.0)
    weights = totals.to(tl.float64) * tl.exp(each - tl.where(most == float("-inf"), 0.0, most)).to(tl.float64)
    chosen, rest = _first_above(weights, fraction)
    chosen = tl.where(is_greedy, largest, chosen)
    column = chosen * COLUMNS + tl.arange(0, COLUMNS)
    values = tl.load(logits + row * width * UNIT + column, mask=column < width * UNIT, other=0.0).to(tl.float32)
    values = tl.where(column < columns, values, float("-inf"))
    most, largest = tl.max(values, 0, return_indices=True)
    weights = tl.exp(values - tl.where(most == float("-inf"), 0.0, most)).to(tl.float64)
    token, _ = _first_above(weights, rest)
    tl.store(found + row, (chosen * COLUMNS + tl.where(is_greedy, largest, token)).to(tl.int64))
