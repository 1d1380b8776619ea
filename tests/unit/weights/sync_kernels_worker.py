"""What test_transfer_plan.py asks the weight sync's kernels in Triton's interpreter; prints yes, or what differs."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import torch
from differing_pairs import wrong_answers

from megatron_grpo.rollout.weight_sync import kernels, planned


def answers() -> list[str]:
    """Return the sizes of pieces for which the kernels and torch's operations have other sums."""
    generator = torch.Generator().manual_seed(0)
    differing = []
    for sizes in ([1], [3, 1, 2], [kernels.ROWS_OF_PIECE + 5, 7], []):
        ends = torch.tensor([1, *sizes]).cumsum(0)  # the first row belongs to no piece
        words = torch.randint(-(2**63), 2**63 - 1, (sum(sizes) + 1, planned.ROW_BYTES // 8), generator=generator)
        rows = torch.stack([ends[:-1], ends[1:]])
        wanted = planned.checksums(words.view(torch.uint8).view(-1), rows)
        if not torch.equal(kernels.checksums(words, rows), wanted):
            differing.append(f"pieces of {sizes} rows")
    return differing


kernels.PROGRAMS = 3  # of each pair, which take tiles in turn
print(answers() + wrong_answers(kernels.differing, "cpu") or "yes")
