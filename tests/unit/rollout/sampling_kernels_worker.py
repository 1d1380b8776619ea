"""What test_sampling_kernels.py asks the kernels of sampling in Triton's interpreter; prints the answers."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from megatron_grpo.rollout.vllm import sampling_kernels
from megatron_grpo.rollout.vllm.sampling_kernels import sample

sampling_kernels.QUARTER = 16
found: dict = {}


def slots(number: int) -> torch.Tensor:
    return torch.arange(number, dtype=torch.int32)


torch.manual_seed(0)
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

# A token has its probability wherever it lies: in each quarter, in two programs. Others may not be sampled.
number, places = 600, torch.tensor([3, 17, 40, 60, 70, 90])
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
