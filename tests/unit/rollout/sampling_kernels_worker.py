"""What test_sampling_kernels.py asks the kernels of sampling in Triton's interpreter; prints the answers."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_grpo.models.exact import kernels
from megatron_grpo.rollout.vllm import sampling_kernels
from megatron_grpo.rollout.vllm.sampling_kernels import sample

kernels.LOGITS = 64
found: dict = {}


def slots(number: int) -> torch.Tensor:
    return torch.arange(number, dtype=torch.int32)


def philox(counter: int, key: int) -> list[int]:
    """Return the words of Philox4x32-10 (Random123)."""
    words, keys = [counter % 2**32, counter >> 32, 0, 0], [key % 2**32, key >> 32]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (second >> 32) ^ words[1] ^ keys[0], second % 2**32, (first >> 32) ^ words[3] ^ keys[1], first % 2**32
        ]  # fmt: skip
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return words


@triton.jit
def uniform_of(seeds, positions, out):
    row = tl.program_id(0)
    tl.store(out + row, sampling_kernels._uniform(tl.load(seeds + row), tl.load(positions + row)))


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(seeds), dtype=torch.float64)
    uniform_of[(len(seeds),)](seeds, positions, out)
    return out


def error_of_uniforms() -> float:
    """Return the largest error of the random number of seeds and positions, among them the largest ones."""
    seeds, positions = torch.randint(0, 2**63 - 1, (64,)), torch.randint(0, 2**31, (64,))
    seeds[:2], positions[:2] = torch.tensor([2**63 - 1, 0]), torch.tensor([2**31 - 1, 0])
    wanted = []
    for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
        high, low, _, _ = philox(position, seed)
        wanted.append((high * 2**20 + (low >> 12) + 0.5) / 2**52)
    return float((uniforms(seeds, positions) - torch.tensor(wanted, dtype=torch.float64)).abs().max())


def misplaced() -> int:
    """Return how many tokens are not where the sum of the probabilities in float64 passes the random number.

    A number within 10^-6 of the border of a token may have its neighbour. Rows begin anywhere and have requests in any
    order, among them greedy ones and any seed of 64 bits. In some rows few tokens may be sampled.
    """
    columns, of_slots, rows = 300, 80, 64
    logits = torch.full((rows, 390), float("inf"))[:, 3 : 3 + columns].copy_(3 * torch.randn(rows, columns))
    logits[32:] = torch.where(torch.rand(32, columns) < 0.02, logits[32:], float("-inf"))
    logits[32:, columns - 1] = 1.0
    requests = torch.randperm(of_slots)[:rows].int()
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (of_slots,)), torch.randint(0, 5000, (rows,))
    seeds[requests[:2]], positions[1] = torch.tensor([2**63 - 1, -(2**63)]), 0
    temperatures = torch.tensor([0.0, 0.7, 1.0, 2.0]).repeat(20)
    tokens = sample(logits, requests, temperatures, seeds, positions)
    drawn = uniforms(seeds[requests.long()], positions)
    wrong = 0
    for row, token in enumerate(tokens.tolist()):
        if temperatures[requests[row]] == 0:
            wrong += token != int(logits[row].argmax())
            continue
        after = logits[row].double().softmax(0).cumsum(0)
        before = float(after[token - 1]) if token else 0.0
        wrong += not before - 1e-6 <= float(drawn[row]) <= float(after[token]) + 1e-6 or logits[row, token] == -np.inf
    return int(wrong)


assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123's own
torch.manual_seed(0)
found["misplaced tokens"], found["error of the random numbers"] = misplaced(), error_of_uniforms()
ties = torch.zeros(2, 150)
ties[1, :70] = -1.0
found["the first of equal logits"] = sample(ties, slots(2) - 2, ties[0], *ties.long()[:, :2]).tolist() == [0, 70]
logits = 3 * torch.randn(12, 150)
seeds, positions = torch.randint(0, 2**40, (12,)), torch.randint(0, 5000, (12,))
hot, cold = torch.ones(12), torch.zeros(12)
found["greedy"] = torch.equal(sample(logits, slots(12), cold, seeds, positions), logits.argmax(1))
found["rows of no request"] = torch.equal(sample(logits, slots(12) - 12, hot, seeds, positions), logits.argmax(1))
whole = sample(logits, slots(12), hot, seeds, positions)
found["with the sums"] = torch.equal(
    whole,
    sample(kernels.whole_rows(logits), slots(12), hot, seeds, positions, kernels.log_sums(kernels.whole_rows(logits))),
)
order = torch.tensor([7, 3, 11])
part = sample(logits[order], order.int(), hot, seeds, positions[order])
found["the same in other rows"] = torch.equal(part, whole[order])
padded = torch.full((12, 192), float("nan"))[:, :150].copy_(logits)
found["columns after the last"] = torch.equal(sample(padded, slots(12), hot, seeds, positions), whole)
found["bfloat16"] = bool((sample(logits.bfloat16(), slots(12), hot, seeds, positions) < 150).all())

# A token has its probability wherever it lies, in two parts of a row. No other is sampled.
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
