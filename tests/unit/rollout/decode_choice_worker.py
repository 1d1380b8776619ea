"""What test_decode_choice.py asks in a process of its own: our kernel in Triton's interpreter, choices of two ranks.

The last line of the output is JSON.
"""

import json
import os
import tempfile

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import torch
import torch.distributed as dist
from test_decode_choice import choose, own_batch

from megatron_grpo.rollout.vllm.decode_attention import decode_attention
from megatron_grpo.rollout.vllm.decode_choice import lengths_of, made_up_batch

GROUPS, HEADS, D, SIZE, LONGEST = 2, 3, 64, 16, 400


def kernel() -> list[str]:
    """Return the parts of a sequence with which outputs differ from float64 over each sequence alone."""
    generator = torch.Generator().manual_seed(0)
    batch = made_up_batch(own_batch(LONGEST, SIZE), lengths_of(5, LONGEST // 2, 1.0), SIZE)
    blocks = int(batch.block_table_tensor.max()) + 1
    cache = torch.randn(blocks, GROUPS, SIZE, 2 * D, generator=generator)
    query = torch.randn(5, GROUPS * HEADS, D, generator=generator)
    wanted = []
    for i, length in enumerate(batch.seq_lens.tolist()):
        rows = cache.double()[batch.block_table_tensor[i].long()].transpose(1, 2).flatten(0, 1)[:length]
        keys, values = rows.repeat_interleave(HEADS, 1).split(D, -1)
        scores = torch.einsum("hd,lhd->hl", query[i].double(), keys) * D**-0.5
        wanted.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values))
    differing = []
    for parts, part in (1, 1024), (4, 128):
        output = torch.full_like(query, 7)
        decode_attention(
            query, cache, batch.block_table_tensor, batch.seq_lens, output, D**-0.5, None, parts, part
        )  # fmt: skip
        if not torch.allclose(output.double(), torch.stack(wanted), atol=1e-4):
            differing.append(f"{parts} parts: {(output.double() - torch.stack(wanted)).abs().max()}")
    return differing


def ranks() -> list[list[str]]:
    """Return the choices of each rank: with times of its own, and with no memory on the second."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        rank = 0 if child else 1
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

        def gains_from(number: int, kernel: str) -> float:
            return 10.0 if kernel == "flash" else 12.0 if number < (512 if rank else 64) else 5.0

        def fails_on_one(number: int, kernel: str) -> float:
            if rank:
                raise torch.OutOfMemoryError("made up")
            return 1.0

        own = [str(choose(times, group=dist.group.WORLD)[0]) for times in (gains_from, fails_on_one)]
        found: list = [None, None]
        dist.all_gather_object(found, own)
        dist.destroy_process_group()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        return found


differing = kernel()
print(json.dumps({"kernel": differing, "ranks": ranks()}))
