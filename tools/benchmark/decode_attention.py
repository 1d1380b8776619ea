"""Measure the attention of decode steps: ours beside FlashAttention 3 as vLLM calls it. Needs a Hopper GPU and vLLM.

    python tools/benchmark/decode_attention.py

Prints a Markdown table: microseconds of a call in a CUDA graph and bytes of keys and values read in a second, with a
cache in bf16 and in FP8 (scales of 1), and the largest difference of the two outputs. Blocks have 16 tokens and lie in
any order. The lengths of the sequences are made up and stand in `CASES`. What eight neighbors share is counted once.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron_grpo.rollout.vllm.decode_choice import GROUP, made_up_blocks

BLOCK = 16  # tokens


@dataclass(frozen=True)
class Case:
    """Sequences whose lengths are drawn between ``shortest`` and ``longest``; lognormal with a ``median``."""

    name: str
    groups: int
    heads: int  # of queries in a group
    channels: int
    sequences: int
    shortest: int
    longest: int
    limit: int  # tokens of a sequence in the engine
    median: int | None = None
    shared: int = 0  # tokens of a prompt, whose blocks `GROUP` neighbors share

    def lengths(self) -> torch.Tensor:
        """Return the lengths ``[sequences]``."""
        generator = torch.Generator().manual_seed(0)
        if self.median is None:
            return torch.randint(self.shortest, self.longest, (self.sequences,), generator=generator).int()
        drawn = self.median * torch.exp(1.1 * torch.randn(self.sequences, generator=generator))
        return drawn.clamp(self.shortest, self.longest).int()


CASES = (
    Case("0.6B, 512 of 68 to 544 tokens", 8, 2, 128, 512, 68, 544, 608),
    Case("0.6B, 64", 8, 2, 128, 64, 68, 544, 608),
    Case("0.6B, 32", 8, 2, 128, 32, 68, 544, 608),
    Case("0.6B, 256 with a long tail", 8, 2, 128, 256, 16, 8192, 8704, median=384),
    Case("0.6B, 190 of 500 to 8,192", 8, 2, 128, 190, 500, 8192, 8704),
    Case("0.5B, 512 of 68 to 610", 2, 7, 64, 512, 68, 610, 1024),
    Case("0.5B, 128", 2, 7, 64, 128, 68, 544, 1024),
    Case("4B, 256 of 68 to 544", 8, 4, 128, 256, 68, 544, 608),
    Case("4B, 256 of 4,112 to 4,608, prompts of 4,096 shared", 8, 4, 128, 256, 4112, 4608, 4640, shared=4096),
    Case("4B, the same not shared", 8, 4, 128, 256, 4112, 4608, 4640),
    Case("0.6B, 512 of 1,040 to 1,536, prompts of 1,024 shared", 8, 2, 128, 512, 1040, 1536, 1568, shared=1024),
    Case("0.5B, 512 of 1,040 to 1,536, prompts of 1,024 shared", 2, 7, 64, 512, 1040, 1536, 1568, shared=1024),
    Case("8B, 64 of 512 to 4,096", 8, 4, 128, 64, 512, 4096, 8192),
    Case("8B, 32 of 1,024 to 16,384", 8, 4, 128, 32, 1024, 16384, 16384),
    Case("8B, 16 of 68 to 544 in an engine of 16,384", 8, 4, 128, 16, 68, 544, 16384),
    Case("8B, 8 of 1,024 to 16,384", 8, 4, 128, 8, 1024, 16384, 16384),
)


def measure(case: Case) -> str:
    """Return the row of a case."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    from megatron_grpo.rollout.vllm.decode_attention import decode_attention, parts_of

    lengths = case.lengths()
    table = made_up_blocks(lengths, BLOCK, -(-case.limit // BLOCK), case.shared).cuda()
    lengths = lengths.cuda()
    cache = torch.randn(
        int(table.max()) + 1, case.groups, BLOCK, 2 * case.channels, device="cuda", dtype=torch.bfloat16
    )
    query = torch.randn(case.sequences, case.groups * case.heads, case.channels, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(case.sequences + 1, dtype=torch.int32, device="cuda")
    one = torch.ones((), device="cuda")
    scale = case.channels**-0.5
    splits = 1 if case.limit <= 1024 else 32  # as an engine of such sequences: colocate.py
    cells = []
    for dtype in torch.bfloat16, torch.float8_e4m3fn:
        q, kv = query.to(dtype), cache.to(dtype)
        quantized = dtype != torch.bfloat16
        theirs, ours = torch.zeros_like(query), torch.zeros_like(query)
        keys, values = kv.transpose(1, 2).split(case.channels, dim=-1)
        scales = (one, one, one) if quantized else None
        whole = one.expand(case.sequences, case.groups)
        metadata = get_scheduler_metadata(
            batch_size=case.sequences, max_seqlen_q=1, max_seqlen_k=case.limit, num_heads_q=query.shape[1],
            num_heads_kv=case.groups, headdim=case.channels, cache_seqlens=lengths, qkv_dtype=dtype,
            cu_seqlens_q=starts, page_size=BLOCK, causal=True, window_size=(-1, -1), num_splits=splits,
        )  # fmt: skip
        options = dict.fromkeys(("q_descale", "k_descale", "v_descale"), whole) if quantized else {}

        def flash(q=q, keys=keys, values=values, out=theirs, metadata=metadata, options=options):
            flash_attn_varlen_func(
                q=q, k=keys, v=values, out=out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=lengths,
                max_seqlen_k=case.limit, softmax_scale=scale, causal=True, block_table=table, fa_version=3,
                num_splits=splits, scheduler_metadata=metadata, **options,
            )  # fmt: skip

        def own(q=q, kv=kv, out=ours, scales=scales):
            decode_attention(q, kv, table, lengths, out, scale, scales, *parts_of(case.limit))

        tokens = int((lengths - case.shared).sum()) + case.shared * case.sequences // GROUP
        read = tokens * kv.stride(2) * case.groups * kv.element_size()
        for attend in flash, own:
            us = microseconds(attend)
            cells.append(f"{us:.1f} ({read / us / 1e6:.2f})")
        cells.append(f"{(theirs.float() - ours.float()).abs().max():.3f}")
    return f"| {case.name} | {' | '.join(cells)} |"


def microseconds(call: Callable[[], None], times: int = 20) -> float:
    """Return the microseconds of one ``call`` in a CUDA graph of ``times``."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("FlashAttention 3 needs a Hopper GPU (H100, H200), and there is none here")
    print("| us (TB/s) | FlashAttention 3 | ours | difference | FlashAttention 3, FP8 | ours, FP8 | difference |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for case in CASES:
        print(measure(case), flush=True)


if __name__ == "__main__":
    main()
