"""What test_sampling_kernels.py asks the kernels of sampling in Triton's interpreter; prints the answers."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_grpo.rollout.vllm import sampling_kernels
from megatron_grpo.rollout.vllm.sampling_kernels import sample

sampling_kernels.QUARTER = 16
found: dict = {}


def slots(number: int) -> torch.Tensor:
    return torch.arange(number, dtype=torch.int32)


def philox(counter: np.ndarray, key: int) -> np.ndarray:
    """Return the block of words of Philox4x32-10 for each ``counter`` ``[n]``: uint32 values ``[4, n]`` (Random123)."""
    low = np.uint64(2**32 - 1)
    words = [counter.astype(np.uint64), *(np.zeros(len(counter), np.uint64) for _ in range(3))]
    keys = [np.uint64(key % 2**32), np.uint64(key >> 32)]
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        shift = np.uint64(32)
        words = [
            (second >> shift) ^ words[1] ^ keys[0], second & low, (first >> shift) ^ words[3] ^ keys[1], first & low
        ]  # fmt: skip
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & low, (keys[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(words)


@triton.jit
def key_of(seeds, positions, key):
    tl.store(key + tl.arange(0, 1), tl.randint(tl.load(seeds), tl.load(positions)).to(tl.int64))


def noise_of(seed: torch.Tensor, position: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the noise of each token in float64 ``[columns]``.

    Triton's versions make other keys of a seed and a position of 64 bits.
    """
    key = torch.empty(1, dtype=torch.int64)
    key_of[(1,)](seed, position, key)
    quarter, parts = sampling_kernels.QUARTER, -(-columns // (4 * sampling_kernels.QUARTER))
    words = philox(np.arange(parts * quarter), int(key) % 2**64).reshape(4, parts, quarter).swapaxes(0, 1).flatten()
    return torch.from_numpy(-np.log(-np.log1p(-(words[:columns] + 0.5) / 2**32)))


@triton.jit
def noise_of_bits(bits, found, NUMBER: tl.constexpr):
    place = tl.arange(0, NUMBER)
    tl.store(found + place, sampling_kernels._noise(tl.load(bits + place)))


def error_of_noise() -> tuple[float, bool]:
    """Return the largest error of the noise of random bits, of the smallest ones, and where the series ends.

    Also whether all of it is finite. The largest 1% of numbers, for which float32 has few digits, seldom decide.
    """
    small, middle = np.arange(2**9), 2**30 + np.arange(-(2**9), 2**9)
    words = np.concatenate([small, small << 16, middle, np.random.default_rng(0).integers(0, 2**32, 2**11 - 2)])
    words = np.concatenate([words, [2**32 - 1, 2**31]]).astype(np.uint32)
    noise = torch.empty(len(words))
    noise_of_bits[(1,)](torch.from_numpy(words.view(np.int32)), noise, NUMBER=len(words))
    u = (words + 0.5) / 2**32
    error = np.abs(noise.double().numpy() + np.log(-np.log1p(-u)))
    return float(error[u < 0.99].max()), bool(noise.isfinite().all())


def gap_to_noise() -> float:
    """Return the largest gap between a sampled token's logit with its noise and the largest one of its row.

    Rows begin anywhere and have requests in any order, among them greedy ones and any seed of 64 bits. In some rows few
    tokens may be sampled: unlikely noise decides.
    """
    columns, of_slots = 150, 40
    logits = torch.full((24, 190), float("inf"))[:, 3 : 3 + columns].copy_(3 * torch.randn(24, columns))
    logits[12:] = torch.where(torch.rand(12, columns) < 0.02, logits[12:], float("-inf"))
    logits[12:, columns - 1] = 1.0
    requests = torch.randperm(of_slots)[:24].int()
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (of_slots,)), torch.randint(0, 5000, (24,))
    seeds[requests[:2]], positions[1] = torch.tensor([2**63 - 1, -(2**63)]), 0
    temperatures = torch.tensor([0.0, 0.7, 1.0, 2.0]).repeat(10)
    tokens = sample(logits, requests, temperatures, seeds, positions)
    gaps = []
    for row, slot in enumerate(requests.tolist()):
        total = logits[row].double()
        if temperatures[slot]:
            total += noise_of(seeds[slot], positions[row], columns)
        gaps.append(float(total.max() - total[tokens[row]]))
    return float(np.max(gaps))  # NaN, too


assert philox(np.zeros(1), 0)[:, 0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123's own
torch.manual_seed(0)
found["gap to the noise in float64"] = gap_to_noise()
found["error of the noise"], found["noise is finite"] = error_of_noise()
ties = torch.zeros(2, 150)
ties[1, :70] = -1.0
found["the first of equal logits"] = sample(ties, slots(2) - 2, ties[0], *ties.long()[:, :2]).tolist() == [0, 70]
logits = 3 * torch.randn(12, 150)
seeds, positions = torch.randint(0, 2**40, (12,)), torch.randint(0, 5000, (12,))
hot, cold = torch.ones(12), torch.zeros(12)
found["greedy"] = torch.equal(sample(logits, slots(12), cold, seeds, positions), logits.argmax(1))
found["rows of no request"] = torch.equal(sample(logits, slots(12) - 12, hot, seeds, positions), logits.argmax(1))
whole = sample(logits, slots(12), hot, seeds, positions)
order = torch.tensor([7, 3, 11])
part = sample(logits[order], order.int(), hot, seeds, positions[order])
found["the same in other rows"] = torch.equal(part, whole[order])
padded = torch.full((12, 200), float("nan"))[:, :150].copy_(logits)
found["columns after the last"] = torch.equal(sample(padded, slots(12), hot, seeds, positions), whole)
found["bfloat16"] = bool((sample(logits.bfloat16(), slots(12), hot, seeds, positions) < 150).all())

# A token has its probability wherever it lies: at one place of each quarter, in two programs. No other is sampled.
number, places = 200, torch.tensor([3, 19, 35, 51, 67, 83])
probabilities = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.07, 0.03])
few = torch.full((number, 100), float("-inf"))
few[:, places] = probabilities.log() + 5
one_seed, further = torch.full((number,), 77), torch.arange(number)
for name, of_seed, of_position in (
    ("positions", one_seed, further), ("seeds", torch.randint(0, 2**40, (number,)), 0 * further)
):  # fmt: skip
    tokens = sample(few, slots(number), torch.ones(number), of_seed, of_position)
    counts = (tokens[:, None] == places).sum(0).double()
    expected = number * probabilities.double()
    found[f"chi-square over {name}"] = float(((counts - expected) ** 2 / expected).sum())
    found[f"only tokens that may be sampled, over {name}"] = int(counts.sum()) == number
json.dump(found, sys.stdout)
