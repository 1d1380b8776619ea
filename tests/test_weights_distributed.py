"""Two ranks, TP2 and PP2: import against transformers' logits, stream and export bit by bit.

All families and both layouts run in one torchrun of this very file, because starting the ranks takes most of the time.
"""

import sys
from pathlib import Path

import pytest
from toy_checkpoints import FAMILIES, VOCAB, build, forward, logits, make, same_bits, tensors_of, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo import initialize
from megatron_grpo.weights import hf
from megatron_grpo.weights.stream import stream_hf

CASES = [(family, tied) for family in FAMILIES for tied in (False, True)]
LAYOUTS = [(2, 1), (1, 2)]  # TP, PP


@pytest.mark.distributed
def test_layouts(tmp_path, torchrun):
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    for family, tied in CASES:
        model = make(tmp_path / f"{family}-{tied}", family, tied)
        with torch.no_grad():
            torch.save((ids, model(ids[None]).logits[0]), tmp_path / f"{family}-{tied}" / "expected.pt")
    done = torchrun(2, __file__, tmp_path, timeout=120)
    assert done.stdout.count("same bits") == len(CASES) * len(LAYOUTS)


def main(directory: Path) -> None:
    first = toy_args(directory / "qwen3-False", *LAYOUTS[0])
    initialize.initialize_distributed(first)
    for tp, pp in LAYOUTS:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, pp)
        initialize.set_random_seed(1)
        for family, tied in CASES:
            check(directory / f"{family}-{tied}", directory / f"{family}-{tied}-out", tp, pp)
            if dist.get_rank() == 0:
                print(f"TP{tp} PP{pp} {family} tied={tied}: same bits", flush=True)


def check(source: Path, target: Path, tp: int, pp: int) -> None:
    args = toy_args(source, tp, pp)
    chunks = build(args)
    hf.load_hf(chunks, args, source)

    ids, expected = torch.load(source / "expected.pt")
    found = all_logits(chunks[0], ids, args)
    if found is not None:
        difference = (found[:, :VOCAB] - expected).abs().max()
        assert difference < 1e-4, f"{source.name} TP{tp} PP{pp}: logits differ by {difference}"

    stored = tensors_of(source)
    for bucket_bytes in (20_000, 2**28):
        streamed = list(stream_hf(chunks, args, bucket_bytes))
        assert sorted(name for name, _ in streamed) == sorted(stored)
        assert all(same_bits(stored[name], tensor) for name, tensor in streamed)
    names = [None, None]
    dist.all_gather_object(names, [name for name, _ in streamed])
    assert names[0] == names[1]

    hf.save_hf(chunks, args, target, max_shard_bytes=50_000)
    written = tensors_of(target)
    assert written.keys() == stored.keys()
    assert all(same_bits(stored[name], written[name]) for name in stored)
    assert hf.verify_hf(chunks, args, source) == len(stored)


def all_logits(model: torch.nn.Module, ids: torch.Tensor, args) -> torch.Tensor | None:
    """Logits of the whole vocabulary, on the ranks of the last pipeline stage."""
    if args.pipeline_model_parallel_size > 1:
        if parallel_state.is_pipeline_first_stage():
            dist.send(forward(model, ids).contiguous(), dst=1)
            return None
        hidden = torch.empty(len(ids), 1, args.hidden_size)
        dist.recv(hidden, src=0)
        model.set_input_tensor(hidden)
        return logits(model, ids)
    own = logits(model, ids).contiguous()
    parts = [torch.empty_like(own) for _ in range(args.tensor_model_parallel_size)]
    dist.all_gather(parts, own, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=1)


if __name__ == "__main__":
    initialize.run(lambda: main(Path(sys.argv[1])))
