"""tools/checkpoint/convert.py --merge-lora: from PEFT's files and from a run's checkpoint."""

import json

import pytest
from convert_tool import load_tool
from toy_checkpoints import VOCAB, add_mtp, build, make, same_bits, tensors_of, toy_args

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.checkpointing import checkpoint
from megatron_grpo.lora import files, stream
from megatron_grpo.lora.attach import adapters, attach, trained
from megatron_grpo.lora.stream import stream_merged
from megatron_grpo.utils.arguments import replaced
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import hf
from megatron_grpo.weights.stream import stream_hf

SETTINGS = {"lora_rank": 4, "lora_target_modules": ["all-linear"], "lora_modules_to_save": ["lm_head", "model.norm"]}


EXPERTS = pytest.param("qwen3_moe", False, "fp8", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("family", "dora", "base_dtype"),
    [("qwen3_moe", False, "model"), ("phi3", True, "model"), ("qwen3", False, "fp8"), EXPERTS],
)
def test_merged_files_are_what_the_engine_gets(world, tmp_path, family, dora, base_dtype):
    """Both roads give the tensors of the merged stream: bit for bit, or with DoRA but for the order of a norm's sum."""
    make(tmp_path / "base", family, tied=False)
    args = toy_args(tmp_path / "base", **SETTINGS, load_hf=str(tmp_path / "base"))
    args = replaced(
        args,
        lora_use_dora=dora,
        lora_base_dtype=base_dtype,
        lora_base={"dtype": "float32"},
        moe_grouped_gemm=base_dtype == "fp8",
    )
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
    args = replaced(args, save=str(tmp_path / "run"))
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
            assert (tensor - expected[name]).abs().max() < 1e-7 if dora else same_bits(tensor, expected[name]), name
        assert sum(not torch.equal(tensor, base[name]) for name, tensor in found.items()) >= 10

    wrong = ["--hf-to-hf", "--load", tmp_path / "base", "--save", tmp_path / "out"]
    with pytest.raises(GrpoError, match="--hf-to-hf needs --merge-lora"):
        tool.convert(tool.build_parser().parse_args(list(map(str, wrong))))
    with pytest.raises(GrpoError, match="holds an adapter only, not the weights below it"):
        checkpoint.load_weights(tmp_path / "run", build(toy_args(tmp_path / "base")))
    run = ["--megatron-to-hf", "--load", tmp_path / "run", "--save", tmp_path / "out"]
    with pytest.raises(GrpoError, match=r"holds an adapter only.*--merge-lora .*run, with --hf-to-hf"):
        tool.convert(tool.build_parser().parse_args(list(map(str, run))))


@pytest.mark.parametrize("what", ["a head that is tied", "a copy for multi-token prediction"])
def test_two_tensors_for_one_parameter_are_not_merged(world, tmp_path, what):
    """The written files would have one of them, whichever that is."""
    tied = what == "a head that is tied"
    model = make(tmp_path / "base", "qwen3" if tied else "glm4_moe", tied=tied)
    if not tied:
        add_mtp(tmp_path / "base", model)
    name = "lm_head.weight" if tied else "model.layers.4.shared_head.head.weight"
    index = json.loads((tmp_path / "base/model.safetensors.index.json").read_text())
    index["weight_map"][name] = "other.safetensors"
    (tmp_path / "base/model.safetensors.index.json").write_text(json.dumps(index))
    save_file({name: torch.zeros(VOCAB, model.config.hidden_size)}, tmp_path / "base/other.safetensors")
    words = ["--hf-to-hf", "--load", tmp_path / "base", "--merge-lora", tmp_path / "run", "--save", tmp_path / "out"]
    tool = load_tool()
    with pytest.raises(GrpoError, match="two different tensors" if tied else f"{name} differs from lm_head.weight"):
        tool.convert(tool.build_parser().parse_args(list(map(str, words))))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += str(function).split(".")[1] in ("addmm", "baddbmm", "mm", "bmm")
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(("together", "products"), [(8, 1), (3, 3), (0, 8)])
def test_experts_of_a_layer_are_merged_together(world, tmp_path, monkeypatch, together, products):
    """Eight experts by one, three or eight products for each weight: bit for bit what one product an expert gives."""
    make(tmp_path, "qwen3_moe", tied=False)
    args = toy_args(tmp_path, lora_rank=4, lora_target_modules=[r".*\.experts\..*"], moe_grouped_gemm=True)
    chunks = build(args)
    hf.load_hf(chunks, args, tmp_path)
    attach(args, chunks)
    for adapter in adapters(chunks):
        adapter.initialize(lambda name, shape: 0.1 * torch.randn(shape))
    of_adapter = {name: tensor.clone() for name, tensor in stream.stream_adapter(chunks, args)}
    expected = {name: tensor.clone() for name, tensor in stream_hf(chunks, args)}
    for name, weight in expected.items():
        if ".experts." in name:
            a, b = (of_adapter[name.replace("weight", f"lora_{x}.weight")] for x in "AB")
            expected[name] = torch.addmm(weight, b, a, alpha=args.lora_alpha / args.lora_rank)
    largest = max(adapter.base_weights().nbytes for adapter in adapters(chunks))
    monkeypatch.setattr(stream, "MERGED_BYTES", together * largest)
    with Products() as counted:
        found = dict(stream.stream_merged(chunks, args))
    assert all(same_bits(tensor, expected[name]) for name, tensor in found.items())
    fc1, fc2 = products, {8: 1, 3: 2, 0: 8}[together]  # the second weight is half as large
    assert counted.count == len(list(adapters(chunks))) // 2 * (fc1 + fc2)
