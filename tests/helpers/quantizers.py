"""Quantize the files of a toy checkpoint in place, and write the dequantized checkpoint beside them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from toy_checkpoints import tensors_of
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

# Rows and columns that divide no matrix of the toy models, so that blocks at the edges are smaller.
FP8_BLOCK = (24, 20)
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(FP8_BLOCK),
    "modules_to_not_convert": ["lm_head"],
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Stored = dict[str, torch.Tensor]


def fp8_blocks(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (e4m3 bytes, scale of each block, dequantized bf16) of a matrix, block by block."""
    height, width = weight.shape
    scales = torch.empty(-(-height // rows), -(-width // columns))
    stored, whole = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(height, width)
    for i, top in enumerate(range(0, height, rows)):
        for j, left in enumerate(range(0, width, columns)):
            there = slice(top, top + rows), slice(left, left + columns)
            block = weight[there].float()
            scales[i, j] = block.abs().max() / 448  # the largest e4m3 number
            stored[there] = (block / scales[i, j]).to(torch.float8_e4m3fn)
            whole[there] = stored[there].float() * scales[i, j]
    return stored, scales, whole.bfloat16()


def mxfp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (blocks, scales) of experts' matrices [experts, in, out], as gpt-oss stores them."""
    blocks = weight.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = blocks.abs().amax(-1).log2().floor() - 2
    scaled = blocks / 2.0 ** exponents[..., None]
    codes = (scaled[..., None] - E2M1).abs().argmin(-1)
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    return packed.to(torch.uint8), (exponents + 127).to(torch.uint8)


def quantize_fp8(name: str, tensor: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Return (stored tensors, dequantized tensor): projections are quantized, as in DeepSeek-V3."""
    if not name.endswith(("_proj.weight", "_a_proj_with_mqa.weight")):
        return {name: tensor}, tensor
    stored, scales, whole = fp8_blocks(tensor, *FP8_BLOCK)
    return {name: stored, f"{name}_scale_inv": scales}, whole


def quantize_mxfp4(name: str, tensor: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Return (stored tensors, transformers' dequantized tensor): matrices of experts are quantized, as in gpt-oss."""
    if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return {name: tensor}, tensor
    blocks, scales = mxfp4_blocks(tensor)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales)


def quantize(directory: Path, dequantized: Path, one: Callable, settings: dict) -> None:
    """Quantize a bf16 checkpoint in place by `one`, and write the model that it then holds to `dequantized`."""
    shutil.copytree(directory, dequantized)
    stored, whole = {}, {}
    for name, tensor in sorted(tensors_of(directory).items()):
        if not name.endswith("e_score_correction_bias"):  # stays float32, as in toy_checkpoints.make
            tensor = tensor.bfloat16()
        more, whole[name] = one(name, tensor)
        stored |= more
    write(directory, stored)
    write(dequantized, whole)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def write(directory: Path, tensors: Stored) -> None:
    """Replace the weights of a directory by these, in two files; scales and their tensors are in different ones."""
    for path in directory.glob("*.safetensors"):
        path.unlink()
    scales = {name for name in tensors if name.endswith(("_scale_inv", "_scales"))}
    files = {"model-1.safetensors": tensors.keys() - scales, "model-2.safetensors": scales}
    for file, names in files.items():
        save_file({name: tensors[name].contiguous() for name in names}, directory / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
