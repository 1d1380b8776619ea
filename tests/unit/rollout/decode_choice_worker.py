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

GROUPS, D, SIZE, LONGEST = 2, 64, 16, 400


def kernel() -> list[str]:
    """Return the batches with which outputs differ from float64 over each sequence alone."""
    generator = torch.Generator().manual_seed(0)
    batch = made_up_batch(own_batch(LONGEST, SIZE), lengths_of(5, LONGEST // 2, 1.0), SIZE)
    table, lengths = batch.block_table_tensor, batch.seq_lens
    found = [differing(table, lengths, heads, parts, generator) for heads in (3, 8) for parts in ((1, 1024), (4, 128))]
    # Families whose first blocks are the same, in sequences that end before, at and after the end of a part.
    lengths = torch.tensor([0, 128, 127, 400, 256, 300, 129, 400, 384, 1, 257, 399], dtype=torch.int32)
    apart = torch.randperm(len(lengths) * 25, generator=generator).view(len(lengths), 25).int()
    for first, last, shared in (1, 6, 8), (3, 5, 16), (6, 12, 17), (8, 11, 24):
        apart[first:last, :shared] = apart[first, :shared]
    apart[9:, 3] = apart[4, 0]  # one block of a part is another one
    for heads, parts in (1, (4, 128)), (3, (4, 128)), (8, (2, 256)), (16, (4, 128)), (2, (3, 136)):
        found.append(differing(apart, lengths, heads, parts, generator))
    return [line for lines in found for line in lines]


def differing(table, lengths, heads: int, parts: tuple[int, int], generator) -> list[str]:
    """Return a line if the outputs of a batch with ``heads`` queries of each head of keys differ from float64."""
    cache = torch.randn(int(table.max()) + 1, GROUPS, SIZE, 2 * D, generator=generator)
    query = torch.randn(len(lengths), GROUPS * heads, D, generator=generator)
    wanted = torch.zeros_like(query, dtype=torch.float64)
    for i, length in enumerate(lengths.tolist()):
        rows = cache.double()[table[i].long()].transpose(1, 2).flatten(0, 1)[:length]
        keys, values = rows.repeat_interleave(heads, 1).split(D, -1)
        scores = torch.einsum("hd,lhd->hl", query[i].double(), keys) * D**-0.5
        wanted[i] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
    output = torch.full_like(query, 7)
    decode_attention(query, cache, table, lengths, output, D**-0.5, None, *parts)
    off = (output.double() - wanted).abs().amax((1, 2))
    return [f"{heads} heads, {parts}: {off.tolist()}"] if not (off < 1e-4).all() else []


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


print(json.dumps({"kernel": kernel(), "ranks": ranks()}))
