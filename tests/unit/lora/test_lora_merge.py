"""tools/checkpoint/convert.py --merge-lora: from PEFT's files and from a run's checkpoint."""

import pytest
from convert_tool import load_tool
from toy_checkpoints import build, make, same_bits, tensors_of, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch

from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.lora import files
from megatron_grpo.lora.attach import adapters, attach, trained
from megatron_grpo.lora.stream import stream_merged
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import hf

SETTINGS = {"lora_rank": 4, "lora_target_modules": ["all-linear"], "lora_modules_to_save": ["lm_head", "model.norm"]}


@pytest.mark.parametrize(("family", "dora"), [("qwen3_moe", False), ("phi3", True)])
def test_merged_files_are_what_the_engine_gets(world, tmp_path, family, dora):
    """Both roads give the tensors of the merged stream: bit for bit, or with DoRA but for the order of a norm's sum."""
    make(tmp_path / "base", family, tied=False)
    args = toy_args(tmp_path / "base", **SETTINGS, lora_use_dora=dora, load_hf=str(tmp_path / "base"))
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path / "base")
    attach(args, chunks)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained(chunks):
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    assert sum(len(adapter.weights()) for adapter in adapters(chunks)) > 10
    expected = {name: tensor.clone() for name, tensor in stream_merged(chunks, args)}
    files.save_adapter(args, chunks, tmp_path / "adapter")
    args.save = str(tmp_path / "run")
    checkpoint.save_checkpoint(args, 3, chunks, None, None, {})

    tool, base = load_tool(), tensors_of(tmp_path / "base")
    for source in ("adapter", "run"):
        words = [
            "--hf-to-hf",
            "--load",
            tmp_path / "base",
            "--merge-lora",
            tmp_path / source,
            "--save",
            tmp_path / "out",
        ]
        tool.convert(tool.build_parser().parse_args(list(map(str, words))))
        found = tensors_of(tmp_path / "out")
        assert found.keys() == expected.keys() == base.keys()
        for name, tensor in found.items():
            assert (tensor - expected[name]).abs().max() < 1e-5 if dora else same_bits(tensor, expected[name]), name
        assert sum(not torch.equal(tensor, base[name]) for name, tensor in found.items()) >= 10

    wrong = ["--hf-to-hf", "--load", tmp_path / "base", "--save", tmp_path / "out"]
    with pytest.raises(GrpoError, match="--hf-to-hf needs --merge-lora"):
        tool.convert(tool.build_parser().parse_args(list(map(str, wrong))))
    with pytest.raises(GrpoError, match="holds an adapter only, not the weights below it"):
        checkpoint.load_weights(tmp_path / "run", build(toy_args(tmp_path / "base")))
