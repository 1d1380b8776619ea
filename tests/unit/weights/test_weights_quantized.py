"""FP8 and MXFP4 checkpoints: values against transformers and by hand, every slice, whole models, damaged files."""

import json

import pytest
from convert_tool import check_same, load_tool
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizers import E2M1, FP8, MXFP4, fp8_blocks, quantize, quantize_fp8, quantize_mxfp4
from slow import slow_except
from toy_checkpoints import add_mtp, build, make, same_bits, tensors_of, toy_args, verify_hf

# toy_checkpoints installs the CPU layer, which comes before megatron.core.
# isort: split
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights import families, hf, model_weights, quantized

CHANNEL = {"type": "float", "num_bits": 8, "strategy": "channel"}


def compressed_tensors(*weights, **more):
    groups = {f"group_{number}": {"weights": group} for number, group in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups, **more}


def reader(directory, settings, **tensors):
    """The reader of a directory with these tensors."""
    save_file(tensors, directory / "model.safetensors")
    return quantized.reader(directory, {"quantization_config": settings})


def random_fp8(rows, columns, generator):
    """Every finite e4m3 number may occur."""
    stored = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    stored[(stored & 0x7F) == 0x7F] = 0x7E  # the two bytes that are not numbers
    return stored.view(torch.float8_e4m3fn)


def same(a, b):
    """Return whether two tensors of numbers are equal, with the signs of zeros; their strides may differ."""
    return a.dtype == b.dtype and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


@st.composite
def ranges(draw, size):
    first = draw(st.integers(0, size - 1))
    return slice(first, draw(st.integers(first + 1, size)))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), rows=st.integers(1, 40), columns=st.integers(1, 40))
def test_any_slice_of_fp8(tmp_path_factory, data, rows, columns):
    block = data.draw(st.tuples(st.integers(1, 50), st.integers(1, 50)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    stored = random_fp8(rows, columns, generator)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=generator) + 1e-3
    source = reader(
        tmp_path_factory.mktemp("fp8"),
        {**FP8, "weight_block_size": list(block)},
        weight=stored,
        weight_scale_inv=scales,
    )
    assert source.names() == ["weight"] and source.dtype("weight") is torch.float32
    of_rows, of_columns = torch.arange(rows) // block[0], torch.arange(columns) // block[1]
    expected = stored.float() * scales[of_rows][:, of_columns]
    assert same(source.read("weight"), expected)
    index = data.draw(ranges(rows)), data.draw(ranges(columns))
    assert same(source.read("weight", index), expected[index])
    assert same(source.read("weight", index[:1]), expected[index[:1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of the scales: DeepSeek-V3, Qwen3
def test_fp8_in_blocks_of_128_equals_transformers(tmp_path, dtype):
    generator = torch.Generator().manual_seed(1)
    stored = random_fp8(256, 384, generator)
    scales = (torch.rand(2, 3, generator=generator) / 100).to(dtype)
    source = reader(tmp_path, {**FP8, "weight_block_size": [128, 128]}, weight=stored, weight_scale_inv=scales)
    theirs = Fp8Dequantize(None)._dequantize_one(stored, scales, torch.bfloat16)
    assert same(source.read("weight").bfloat16(), theirs)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), experts=st.integers(1, 3), blocks=st.integers(1, 4), out=st.integers(1, 12))
def test_any_slice_of_mxfp4_equals_transformers(tmp_path_factory, data, experts, blocks, out):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    packed = torch.randint(0, 256, (experts, out, blocks, 16), generator=generator, dtype=torch.uint8)
    # 2^127 times 6 overflows; below 2^-125 bf16 has no normal numbers, which tests the smallest scales too.
    scales = torch.randint(0, 252, (experts, out, blocks), generator=generator, dtype=torch.uint8)
    source = reader(tmp_path_factory.mktemp("mxfp4"), MXFP4, w_blocks=packed, w_scales=scales)
    expected = convert_moe_packed_tensors(packed, scales)
    assert list(source.names()) == ["w"] and source.dtype("w") is torch.float32
    assert source.shape("w") == expected.shape
    assert same(source.read("w").bfloat16(), expected)
    expert = data.draw(st.integers(0, experts - 1))
    index = expert, data.draw(ranges(32 * blocks)), data.draw(ranges(out))
    assert same(source.read("w", index).bfloat16(), expected[index])
    index = data.draw(ranges(experts)), *index[1:]
    assert same(source.read("w", index).bfloat16(), expected[index])


def test_mxfp4_by_hand(tmp_path):
    """Low nibble first; the 16 values of e2m1; a scale of 2^(byte - 127)."""
    packed = torch.tensor([*range(0x10, 0x100, 0x22), *[0] * 8], dtype=torch.uint8)[:16]
    source = reader(
        tmp_path, MXFP4, w_blocks=packed.view(1, 1, 1, 16), w_scales=torch.tensor([[[129]]], dtype=torch.uint8)
    )
    nibbles = [nibble for byte in packed.tolist() for nibble in (byte % 16, byte // 16)]
    assert source.read("w").flatten().tolist() == [4 * E2M1[nibble].item() for nibble in nibbles]
    assert nibbles[:4] == [0, 1, 2, 3] and source.read("w").flatten().tolist()[:4] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("settings", "suffix", "shape", "block"),
    [
        (compressed_tensors(CHANNEL), "_scale", (6, 1), (1, 5)),
        (compressed_tensors(CHANNEL), "_scale", (6,), (1, 5)),
        (compressed_tensors({**CHANNEL, "strategy": "tensor"}), "_scale", (1,), (6, 5)),
        (compressed_tensors({**CHANNEL, "strategy": "block", "block_structure": [4, 2]}), "_scale", (2, 3), (4, 2)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", (), (6, 5)),
        ({"quant_method": "fp8"}, "_scale_inv", (), (6, 5)),
    ],
)
def test_scales_per_channel_matrix_and_block(tmp_path, settings, suffix, shape, block):
    generator = torch.Generator().manual_seed(2)
    stored, scales = random_fp8(6, 5, generator), torch.rand(shape, generator=generator) + 0.1
    tensors = {"a.weight": stored, f"a.weight{suffix}": scales, "a.input_scale": torch.ones(1), "b": torch.ones(2)}
    source = reader(tmp_path, settings, **tensors)
    assert set(source.names()) == {"a.weight", "b"}
    rows, columns = block
    grid = scales.reshape(-(-6 // rows), -(-5 // columns))
    expected = torch.tensor(
        [[stored[i, j].item() * grid[i // rows, j // columns].item() for j in range(5)] for i in range(6)],
        dtype=torch.float32,
    )
    assert source.dtype("a.weight") is torch.float32
    assert same(source.read("a.weight", (slice(1, 5), slice(1, 4))), expected[1:5, 1:4])
    assert torch.equal(source.read("b"), torch.ones(2))


def quantized_toy(directory, family, mtp=False):
    """A quantized toy checkpoint, and the same model in bf16; return both directories."""
    packed, whole = directory / family, directory / f"{family} in bf16"
    model = make(packed, family, tied=False, dtype=torch.bfloat16)
    if mtp:
        add_mtp(packed, model)
    quantize(packed, whole, *((quantize_mxfp4, MXFP4) if family == "gpt_oss" else (quantize_fp8, FP8)))
    return packed, whole


@pytest.mark.parametrize("family", slow_except(["gpt_oss"], ["deepseek_v3", "gpt_oss"]))
def test_a_quantized_model_loads_as_the_dequantized_one(world, tmp_path, capsys, family):
    packed, whole = quantized_toy(tmp_path, family, mtp=family == "deepseek_v3")
    args = toy_args(packed, bf16=True)
    (ours,), (theirs,) = (build(args) for _ in range(2))
    hf.load_hf([ours], args, packed)
    method = {"deepseek_v3": "fp8 in blocks of 24 x 20", "gpt_oss": "mxfp4"}[family]
    line = f"weights in {method} are dequantized when they are read; config.json is written without quantization_config"
    assert capsys.readouterr().out == f"{packed}: {line}\n"
    hf.load_hf([theirs], args, whole)
    assert capsys.readouterr().out == ""
    expected = dict(model_weights.named_weights([theirs]))
    assert all(same_bits(tensor, expected[name]) for name, tensor in model_weights.named_weights([ours]))
    assert verify_hf([ours], args, packed) == len(tensors_of(whole))
    hf.save_hf([ours], args, tmp_path / "out", tokenizer_dir=packed)
    check_same(whole, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("family", slow_except(["deepseek_v3"], ["deepseek_v3", "gpt_oss"]))
def test_a_quantized_model_converts_as_the_dequantized_one(world, tmp_path, capsys, family):
    packed, whole = quantized_toy(tmp_path, family)
    tool = load_tool()
    for words in (
        ("--hf-to-megatron", "--load", packed, "--save", tmp_path / "megatron", "--verify"),
        ("--megatron-to-hf", "--load", tmp_path / "megatron", "--save", tmp_path / "back"),
    ):
        tool.convert(tool.build_parser().parse_args([str(word) for word in words]))
    check_same(whole, tmp_path / "back")
    out = capsys.readouterr().out
    assert f"verified: {len(tensors_of(whole))} tensors are equal" in out
    assert "the logits of 16 tokens differ from transformers' by at most" in out
    for directory in ("megatron/hf_assets", "back"):
        assert "quantization_config" not in json.loads((tmp_path / directory / "config.json").read_text())


PROJ = "model.layers.1.self_attn.o_proj.weight"
DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    directory = tmp_path_factory.mktemp("toys")
    return {family: quantized_toy(directory, family)[0] for family in ("deepseek_v3", "gpt_oss")}


def first(value):
    """Change: the first element becomes `value`."""

    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("family", "name", "change", "message"),
    [
        (
            "deepseek_v3",
            f"{PROJ}_scale_inv",
            None,
            rf"1\.saf.* {PROJ} is stored as F8_E4M3, but the files hold neither",
        ),
        ("deepseek_v3", f"{PROJ}_scale_inv", lambda s: s[:-1], rf"2\.saf.*{PROJ}_sc.* \(2, 7\), but .* needs \(3, 7\)"),
        ("deepseek_v3", f"{PROJ}_scale_inv", lambda s: s.mT, rf"2\.saf.*{PROJ}_scale_inv has shape \(7, 3\)"),
        ("deepseek_v3", f"{PROJ}_scale_inv", lambda s: s.to(torch.uint8), rf"2\.saf.*{PROJ}_scale_inv is stored as U8"),
        (
            "deepseek_v3",
            f"{PROJ}_scale_inv",
            first(torch.nan),
            rf"2\.saf.*{PROJ}_scale_inv holds values that are not f",
        ),
        ("deepseek_v3", PROJ, lambda w: w.bfloat16(), rf"1\.saf.*{PROJ} is stored as BF16, but has scales"),
        ("deepseek_v3", PROJ, first(torch.nan), rf"1\.saf.*{PROJ} holds values that are not finite: it is damaged"),
        ("deepseek_v3", PROJ, None, f"lacks the tensor {PROJ}"),
        (
            "gpt_oss",
            f"{DOWN}_scales",
            None,
            rf"1\.saf.* holds the tensor {DOWN}_blocks, but no file holds {DOWN}_scales",
        ),
        (
            "gpt_oss",
            f"{DOWN}_blocks",
            None,
            rf"2\.saf.* holds the tensor {DOWN}_scales, but no file holds {DOWN}_blocks",
        ),
        (
            "gpt_oss",
            f"{DOWN}_scales",
            lambda s: s[:, :-1],
            rf"2\.saf.*{DOWN}_scales has shape \(8, 63, 3\), but .*\(8, 64",
        ),
        ("gpt_oss", f"{DOWN}_scales", lambda s: s.float(), rf"2\.saf.*{DOWN}_scales is stored as F32"),
        ("gpt_oss", f"{DOWN}_scales", first(255), rf"2\.saf.*{DOWN}_scales holds values that are not finite"),
        (
            "gpt_oss",
            f"{DOWN}_blocks",
            lambda b: b.flatten(2),
            rf"1\.saf.*{DOWN}_blocks has shape \(8, 64, 48\), but MX",
        ),
        ("gpt_oss", f"{DOWN}_blocks", lambda b: b[..., :8], rf"1\.saf.*{DOWN}_blocks has shape \(8, 64, 3, 8\)"),
    ],
)
def test_damaged_scales(world, toys, tmp_path, family, name, change, message):
    """One message, with the file and the tensor."""
    for path in toys[family].iterdir():
        (tmp_path / path.name).symlink_to(path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    file = tmp_path / index["weight_map"][name]
    tensors = load_file(file)
    if change is None:
        del tensors[name], index["weight_map"][name]
        (tmp_path / "model.safetensors.index.json").unlink()
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        tensors[name] = change(tensors[name]).contiguous()
    file.unlink()
    save_file(tensors, file)
    args = toy_args(tmp_path, bf16=True)
    with pytest.raises(GrpoError, match=message):
        hf.load_hf(build(args), args, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "awq"}, r"quant_method 'awq'; supported are fp8 .*: give the model's checkpoint in bf16"),
        ({"quant_method": "gptq"}, "quant_method 'gptq'; supported"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'; supported"),
        ({"load_in_4bit": True}, "quant_method None; supported"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2': only e4m3"),
        ({**FP8, "weight_block_size": [128, 0]}, r"a block of \[128, 0\]"),
        (
            compressed_tensors({"type": "int", "num_bits": 8, "strategy": "group"}, format="pack-quantized"),
            r"format 'pack-quantized' with weights .*'num_bits': 8.*; supported are .*'num_bits': 4",
        ),
        (
            compressed_tensors(CHANNEL, {**CHANNEL, "strategy": "block", "block_structure": [128, 128]}),
            "blocks of several sizes",
        ),
        ({"quant_method": "compressed-tensors"}, r"config_groups has weights .* \(None, None, None\)"),
    ],
)
def test_refused_formats(toys, settings, message):
    config = {**hf.read_config(toys["deepseek_v3"]), "quantization_config": settings}
    with pytest.raises(GrpoError, match=message):
        families.for_hf_config(config).args_from_hf(config)


def test_quantizer_has_blocks_at_the_edges():
    """The toy checkpoints are no special case: every kind of block occurs."""
    _, scales, whole = fp8_blocks(torch.randn(50, 45), 24, 20)
    assert scales.shape == (3, 3) and whole.dtype is torch.bfloat16
