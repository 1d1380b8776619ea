"""Two and four ranks in many layouts: import against transformers' logits, stream and export bit by bit.

All families and layouts of one number of ranks run in one torchrun of this very file, because starting the ranks takes
most of the time.
"""

import sys
from pathlib import Path

import pytest
from toy_checkpoints import (
    DENSE,
    VOCAB,
    add_mtp,
    build,
    forward,
    make,
    same_bits,
    tensors_of,
    toy_args,
)

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo import initialize
from megatron_grpo.arguments import parse_args
from megatron_grpo.weights import hf
from megatron_grpo.weights.stream import stream_hf

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
TP4 = {"tensor_model_parallel_size": 4}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
VPP2 = {**PP2, "num_virtual_stages_per_pipeline_rank": 2}
GROUPED = {"moe_grouped_gemm": True}
DENSE_CASES = [(f"{family}-{tied}", layout) for family in DENSE for tied in ("tied", "untied") for layout in (TP2, PP2)]
MOE = ("qwen3_moe", "deepseek_v3")
MOE_CASES = [
    (family, layout)
    for family in MOE
    for layout in (EP2, {**EP2, **GROUPED}, TP2, {**TP2, **EP2}, {**TP2, **GROUPED}, PP2, VPP2)
]
MORE = ("mixtral", "glm4_moe")
MORE_CASES = [(family, layout) for family in MORE for layout in (EP2, {**TP2, **GROUPED}, PP2)] + [("glm4_moe", VPP2)]
CASES = {
    2: [*DENSE_CASES, *MOE_CASES, *MORE_CASES, ("mtp", PP2), ("mtp", {**TP2, **EP2})],
    4: [
        ("mtp", {**TP2, **EP2, "expert_tensor_parallel_size": 2}),  # one gather over experts and their shards
        ("mtp", {**TP2, **PP2, **EP2}),
        ("qwen3_moe", {**EP2, **VPP2, **GROUPED}),
        ("phi3-untied", TP4),
        ("mixtral", TP4),
    ],
}


def models(directory: Path) -> dict[str, torch.nn.Module]:
    """Write the checkpoints of all cases; returns transformers' models."""
    dense = {f"{family}-{tied}": (family, tied == "tied") for family in DENSE for tied in ("tied", "untied")}
    named = {**dense, **{family: (family, False) for family in (*MOE, *MORE)}, "mtp": ("deepseek_v3", False)}
    made = {name: make(directory / name, family, tied) for name, (family, tied) in named.items()}
    add_mtp(directory / "mtp", made["mtp"])
    return made


@pytest.mark.distributed
def test_two_ranks(tmp_path, torchrun):
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    for name, model in models(tmp_path).items():
        with torch.no_grad():
            torch.save((ids, model(ids[None]).logits[0]), tmp_path / name / "expected.pt")
    done = torchrun(2, __file__, tmp_path, timeout=240)
    assert done.stdout.count("same bits") == len(CASES[2])


@pytest.mark.distributed
def test_four_ranks(tmp_path, torchrun):
    models(tmp_path)
    done = torchrun(4, __file__, tmp_path, timeout=240)
    assert done.stdout.count("same bits") == len(CASES[4])


def main(directory: Path) -> None:
    initialize.initialize_distributed(parse_args([]))
    for number, (name, layout) in enumerate(CASES[dist.get_world_size()]):
        args = toy_args(directory / name, **layout)
        parallel_state.destroy_model_parallel()
        initialize.initialize_distributed(args)
        initialize.set_random_seed(1)
        check(directory / name, directory / f"out-{number}", args)
        if dist.get_rank() == 0:
            print(f"{name} {layout}: same bits", flush=True)


def check(source: Path, target: Path, args) -> None:
    chunks = build(args)
    hf.load_hf(chunks, args, source)
    assert not any(parameter.isnan().any() for chunk in chunks for parameter in chunk.parameters())

    if dist.get_world_size() == 2 and not args.mtp_num_layers:
        ids, expected = torch.load(source / "expected.pt")
        found = all_logits(chunks, ids, args)
        if found is not None:
            difference = (found[:, :VOCAB] - expected).abs().max()
            assert difference < 1e-4, f"{source.name}: logits differ by {difference}"

    stored = tensors_of(source)
    for bucket_bytes in (20_000, 2**28):
        streamed = list(stream_hf(chunks, args, bucket_bytes))
        assert sorted(name for name, _ in streamed) == sorted(stored)
        assert all(same_bits(stored[name], tensor) for name, tensor in streamed)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, [name for name, _ in streamed])
    assert all(names[0] == other for other in names)

    hf.save_hf(chunks, args, target, max_shard_bytes=50_000)
    written = tensors_of(target)
    assert written.keys() == stored.keys()
    assert all(same_bits(stored[name], written[name]) for name in stored)
    assert hf.verify_hf(chunks, args, source) == len(stored)


def all_logits(chunks: list[torch.nn.Module], ids: torch.Tensor, args) -> torch.Tensor | None:
    """Logits [tokens, vocabulary] by two ranks, on those of the last pipeline stage."""
    if args.pipeline_model_parallel_size == 1:
        own = forward(chunks[0], ids)[0].contiguous()
        parts = [torch.empty_like(own) for _ in range(args.tensor_model_parallel_size)]
        dist.all_gather(parts, own, group=parallel_state.get_tensor_model_parallel_group())
        return torch.cat(parts, dim=1)
    rank = dist.get_rank()
    for chunk in chunks:
        if not chunk.pre_process:
            hidden = torch.empty(len(ids), 1, args.hidden_size)
            dist.recv(hidden, src=1 - rank)
            chunk.set_input_tensor(hidden)
        out = forward(chunk, ids)
        if chunk.post_process:
            return out[0]
        dist.send(out.contiguous(), dst=1 - rank)
    return None


if __name__ == "__main__":
    initialize.run(lambda: main(Path(sys.argv[1])))
