"""Two and four ranks in many layouts: import against transformers' logits, stream and export bit by bit.

All families and layouts of one number of ranks run in one torchrun of this very file, because starting the ranks takes
most of the time.
"""

import sys
from pathlib import Path

import pytest
from toy_checkpoints import (
    MAMBA_MOE,
    MEMBERS,
    MOE,
    VOCAB,
    add_mtp,
    build,
    forward,
    make,
    same_bits,
    tensors_of,
    toy_args,
    verify_hf,
)

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo.parallel import initialize
from megatron_grpo.training import entry_point
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.weights import hf
from megatron_grpo.weights.stream import describe, stream_hf

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
TP4 = {"tensor_model_parallel_size": 4}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
VPP2 = {**PP2, "num_virtual_stages_per_pipeline_rank": 2}
GROUPED = {"moe_grouped_gemm": True}
UNTIED = (*(family for family, tied in MEMBERS if not tied), MAMBA_MOE)
WITH_EXPERTS = (*MOE, MAMBA_MOE)
TIED = tuple(f"{family}, tied" for family in ("qwen3", "llama", "gemma2"))
MTP = tuple(
    f"{family}, mtp" for family in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text")
)
CASES = {
    2: [
        *((name, layout) for name in (*UNTIED, *TIED) for layout in (TP2, PP2, VPP2)),
        *(
            (name, layout)
            for name in WITH_EXPERTS
            for layout in (EP2, {**EP2, **GROUPED}, {**TP2, **GROUPED}, {**TP2, **EP2})
        ),
        *((name, layout) for name in MTP for layout in (PP2, {**TP2, **EP2})),
    ],
    4: [
        *((name, layout) for name in (*UNTIED, *TIED) for layout in (TP4, {**TP2, **PP2})),
        *((name, {**TP2, **PP2, **EP2}) for name in (*WITH_EXPERTS, *MTP)),
        ("qwen3_moe", {**EP2, **VPP2, **GROUPED}),
        # one gather over experts and their shards
        *((name, {**TP2, **EP2, "expert_tensor_parallel_size": 2}) for name in MTP),
    ],
}
# By default each layout runs once: experts where they matter, tied embeddings on two shards and on two stages.
FEW = {
    2: [
        ("qwen3", TP2),
        ("qwen3", VPP2),
        ("gemma2, tied", TP2),
        ("gemma2, tied", PP2),
        *(("deepseek_v3", layout) for layout in ({**EP2, **GROUPED}, {**TP2, **GROUPED}, {**TP2, **EP2})),
    ],
    4: [("qwen3", TP4), ("gemma2, tied", {**TP2, **PP2}), ("deepseek_v3", {**TP2, **PP2, **EP2})],
}
NUM_TOKENS = 40


def models(directory: Path, names: set[str]) -> None:
    """Write the checkpoints of all cases, with the logits that transformers' models give."""
    ids = torch.randint(VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(5))
    for name in sorted(names):
        family, _, kind = name.partition(", ")
        model = make(directory / name, family, tied=kind == "tied", num_hidden_layers=4)
        with torch.no_grad():
            torch.save((ids, model(ids[None]).logits[0]), directory / name / "expected.pt")
        if kind == "mtp":
            add_mtp(directory / name, model)


def share(ranks: int, which: str) -> list:
    """The "few" cases, or "the others"."""
    assert all(case in CASES[ranks] for case in FEW[ranks])
    return [case for case in CASES[ranks] if (case in FEW[ranks]) == (which == "few")]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("which", ["few", "the others"])
@pytest.mark.parametrize("ranks", CASES)
def test_every_family_in_every_layout(ranks, which, tmp_path, torchrun):
    cases = share(ranks, which)
    models(tmp_path, {name for name, _ in cases})
    done = torchrun(ranks, __file__, tmp_path, which)
    assert done.stdout.count("same logits, same bits") == len(cases)


def main(directory: Path, which: str) -> None:
    initialize.initialize_distributed(parse_args([]))
    ready = None
    # Layout by layout: process groups have threads that stay.
    for number, (name, layout) in enumerate(sorted(share(dist.get_world_size(), which), key=lambda case: str(case[1]))):
        # megatron-core has biased experts without tensor parallelism of their own only
        whole = {"expert_tensor_parallel_size": 1} if name == "gpt_oss" else {}
        args = toy_args(directory / name, **{**layout, **whole, **({"mtp_num_layers": 1} if name in MTP else {})})
        if ready != (sizes := {**layout, **GROUPED, **whole}):
            initialize.destroy_rank_groups()
            initialize.initialize_distributed(args)
            ready = sizes
        initialize.set_random_seed(1)
        check(directory / name, directory / f"out-{number}", args)
        if dist.get_rank() == 0:
            print(f"{name} {layout}: same logits, same bits", flush=True)


def check(source: Path, target: Path, args) -> None:
    chunks = build(args)
    hf.load_hf(chunks, args, source)
    assert not any(parameter.isnan().any() for chunk in chunks for parameter in chunk.parameters())

    ids, expected = torch.load(source / "expected.pt")
    # Multi-token prediction wants labels: tests/unit/weights/test_weights_hf.py compares its outputs.
    found = None if args.mtp_num_layers else all_logits(chunks, ids, args)
    if found is not None:
        difference = (found[:, :VOCAB] - expected).abs().max()
        assert difference < 1e-4, f"{source.name}: logits differ by {difference}"

    stored = tensors_of(source)
    for bucket_bytes in (20_000, 2**28):
        streamed = list(stream_hf(chunks, args, bucket_bytes))
        assert sorted(name for name, _ in streamed) == sorted(stored)
        assert all(same_bits(stored[name], tensor) for name, tensor in streamed)
    assert describe(args) == [(name, tensor.dtype, tensor.shape) for name, tensor in streamed]
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, [name for name, _ in streamed])
    assert all(names[0] == other for other in names)

    hf.save_hf(chunks, args, target, max_shard_bytes=50_000)
    written = tensors_of(target)
    assert written.keys() == stored.keys()
    assert all(same_bits(stored[name], written[name]) for name in stored)
    assert verify_hf(chunks, args, source) == len(stored)


def all_logits(chunks: list[torch.nn.Module], ids: torch.Tensor, args) -> torch.Tensor | None:
    """Logits [tokens, vocabulary] on the ranks of the last pipeline stage; None elsewhere. One or two stages."""
    tp_size = args.tensor_model_parallel_size
    stages = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    other = next((rank for rank in stages if rank != dist.get_rank()), None)
    for chunk in chunks:
        if not chunk.pre_process:
            dist.recv(width := torch.zeros((), dtype=torch.int64), src=other)  # Gemma 4's stages pass on more
            hidden = torch.empty(len(ids) // (tp_size if args.sequence_parallel else 1), 1, int(width))
            dist.recv(hidden, src=other)
            chunk.set_input_tensor(hidden)
        out = forward(chunk, ids)
        if not chunk.post_process:
            dist.send(torch.tensor(out.shape[-1]), dst=other)
            dist.send(out.contiguous(), dst=other)
            continue
        parts = [torch.empty_like(out[0]) for _ in range(tp_size)]
        dist.all_gather(parts, out[0].contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return torch.cat(parts, dim=1)
    return None


if __name__ == "__main__":
    entry_point.run(lambda: main(Path(sys.argv[1]), sys.argv[2]))
