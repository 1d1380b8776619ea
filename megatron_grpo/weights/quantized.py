"""Readers of quantized Hugging Face checkpoints: each read returns dequantized float32 values of one slice.

- FP8: a matrix stored as e4m3 bytes W and scales S; the weight is W[i, j] * S[i // rows, j // columns] for blocks of
  `rows` x `columns` elements; the blocks at the edges may be smaller. DeepSeek-V3 (arXiv:2412.19437, section 3.3) has
  blocks of 128 x 128; other checkpoints have one scale per output channel or per matrix.
- MXFP4 (OCP Microscaling Formats, version 1.0): blocks of 32 e2m1 values with one e8m0 scale, the power of two
  2^(byte - 127). gpt-oss packs two values into a byte, the first one in the low 4 bits.
- INT4 (compressed-tensors' format pack-quantized): integers from -8 to 7 in groups of a row with one scale (Kimi-K2.5).

The product is computed in float32, so a weight is rounded once, to the dtype of the parameter that it is copied to. A
read of a slice reads the bytes of the blocks that contain the slice, and the matrix's scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.utils.errors import GrpoError, InputError
from megatron_grpo.weights.safetensors_files import Safetensors

# Keys of config.json that describe quantized weights; compression_config is of older versions of compressed-tensors.
CONFIG_KEYS = {"quantization_config", "compression_config"}
_CURE = "give the model's checkpoint in bf16, fp16 or fp32"
_SUPPORTED = "fp8 (e4m3), mxfp4, and compressed-tensors with 8-bit float or packed 4-bit integer weights"
_FLOATS = ("F32", "BF16", "F16")
_MX_BLOCK = 32
_PER_INT32 = 8  # 4-bit integers
_SUFFIXES = ("_blocks", "_scales")
# The 16 values of e2m1 by their bits: sign, 2 of exponent, 1 of mantissa.
_E2M1 = torch.tensor([sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
# [256, 2]: the two values in a byte. [256]: the value of a scale; 255 is not a number.
_PAIRS = torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], dim=1)
_E8M0 = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")])


def reader(hf_dir: str | Path, config: Mapping[str, Any]) -> Safetensors:
    """Return the reader of the weights in a directory with this config.json.

    Raises GrpoError for a quantization that is not supported, and when the files cannot be read.
    """
    found = _format(config)
    return Safetensors(hf_dir) if found is None else found(hf_dir)


def check_config(config: Mapping[str, Any]) -> None:
    """Raise GrpoError when a config.json describes quantized weights that cannot be read."""
    _format(config)


def _format(config: Mapping[str, Any]) -> Callable[[str | Path], Safetensors] | None:
    """Return the class that reads the weights of a config.json's quantization, None when they are not quantized."""
    key = next((key for key in sorted(CONFIG_KEYS) if config.get(key)), None)
    if key is None:
        return None
    settings, default = config[key], "compressed-tensors" if key == "compression_config" else None
    method = settings.get("quant_method", default)
    if method == "mxfp4":
        return Mxfp4Safetensors
    if method == "fp8":
        if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise GrpoError(f"config.json has a {key} of fp8 with fmt {settings['fmt']!r}: only e4m3 is read; {_CURE}")
        return partial(Fp8Safetensors, block=_block(settings.get("weight_block_size"), key))
    if method == "compressed-tensors" and settings.get("format") == "pack-quantized":
        return partial(Int4Safetensors, group=_int4_group(settings, key))
    if method == "compressed-tensors":
        return partial(Fp8Safetensors, block=_compressed_tensors_block(settings, key))
    raise GrpoError(f"config.json has a {key} of quant_method {method!r}; supported are {_SUPPORTED}: {_CURE}")


def _block(size: Any, key: str) -> tuple[int, int] | None:
    if size is None:
        return None
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise GrpoError(f"config.json has a {key} with a block of {size!r}: two positive numbers are needed; {_CURE}")
    return size[0], size[1]


def _compressed_tensors_block(settings: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Return the block of compressed-tensors' strategy "block", None for one scale per channel or per matrix."""
    blocks = set()
    for name, group in (settings.get("config_groups") or {"config_groups": {}}).items():
        weights = group.get("weights") or {}
        found = tuple(weights.get(setting) for setting in ("type", "num_bits", "strategy"))
        if found[:2] != ("float", 8) or found[2] not in ("tensor", "channel", "block"):
            raise GrpoError(
                f"config.json has a {key} of quant_method 'compressed-tensors' ({settings.get('format')}), whose "
                f"{name} has weights of type, bits and strategy {found}; supported are float, 8, and tensor, channel "
                f"or block: {_CURE}"
            )
        blocks.add(_block(weights.get("block_structure"), key) if found[2] == "block" else None)
    if len(blocks) > 1:
        raise GrpoError(f"config.json has a {key} with blocks of several sizes, which is not supported: {_CURE}")
    return blocks.pop()


def _int4_group(settings: Mapping[str, Any], key: str) -> int:
    """Return the number of weights that share a scale in compressed-tensors' packed 4-bit integers."""
    wanted = {"type": "int", "num_bits": 4, "strategy": "group", "symmetric": True}
    groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    for weights in groups:
        found = {setting: weights.get(setting) for setting in wanted}
        if found != wanted or weights.get("actorder"):
            raise GrpoError(
                f"config.json has a {key} of format 'pack-quantized' with weights {weights}; supported are {wanted} "
                f"without actorder: {_CURE}"
            )
    sizes = {weights.get("group_size") for weights in groups}
    if len(sizes) != 1 or type(size := sizes.pop()) is not int or size <= 0 or size % _PER_INT32:
        raise GrpoError(f"config.json has a {key} without one group_size, a multiple of {_PER_INT32}: {_CURE}")
    return size


class Fp8Safetensors(Safetensors):
    """Reader of a directory in which some matrices are stored as e4m3, with their scales in tensors of their own.

    The scales of tensor T are in T_scale_inv or T_scale; both names mean that they are multiplied. `block`: (rows,
    columns) that share a scale, None where the scales' shape tells: one per row or one per matrix. Scales of
    activations are ignored.
    """

    def __init__(self, hf_dir: str | Path, block: tuple[int, int] | None):
        super().__init__(hf_dir)
        self._block = block
        self.quantization = "fp8" + (f" in blocks of {block[0]} x {block[1]}" if block else "")
        self._find_parts()

    def _find_parts(self) -> None:
        self._scales: dict[str, str] = {}
        for suffix in ("_scale_inv", "_scale"):
            for name in self._where:
                if name.endswith(suffix) and (weight := name.removesuffix(suffix)) in self._where:
                    self._scales.setdefault(weight, name)
        modules = {weight.removesuffix("weight") for weight in self._scales}
        self._no_weights = {*self._scales.values()} | {
            module + scale for module in modules for scale in ("input_scale", "activation_scale")
        }

    def names(self) -> Iterable[str]:
        return [name for name in self._where if name not in self._no_weights]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` returns; raise GrpoError when a quantized tensor and its scales do not match."""
        stored = self._slice(name).get_dtype()
        if name in self._scales:
            if stored != "F8_E4M3":
                raise GrpoError(
                    f"{self._where[name]}: tensor {name} is stored as {stored}, but has scales, {self._scales[name]}: "
                    f"only F8_E4M3 with scales is supported; {_CURE}"
                )
            self._grid(name)
            return torch.float32
        if stored == "F8_E4M3":
            raise GrpoError(
                f"{self._where[name]}: tensor {name} is stored as {stored}, but the files hold neither "
                f"{name}_scale_inv nor {name}_scale: a part of the checkpoint is missing"
            )
        return super().dtype(name)

    def read(self, name: str, index: tuple[int | slice, ...] = (slice(None),)) -> Tensor:
        """Return tensor[index] of one tensor, on the CPU; float32 if it is quantized. Slices have step 1."""
        if name not in self._scales:
            return super().read(name, index)
        (rows, columns), grid = self._grid(name)
        scales = super().read(self._scales[name], (...,)).float().reshape(grid)  # type: ignore[arg-type]
        _check_finite(self._where[self._scales[name]], self._scales[name], scales)
        (top, bottom), (left, right) = _ranges(self.shape(name), index)
        values = super().read(name, (slice(top, bottom), slice(left, right))).float()
        # [rows of the slice, blocks in a row]
        by_row = scales[top // rows : -(-bottom // rows)].repeat_interleave(rows, 0)[top % rows :][: bottom - top]
        for number in range(left // columns, -(-right // columns)):
            first, last = max(number * columns, left), min((number + 1) * columns, right)
            values[:, first - left : last - left] *= by_row[:, number, None]
        _check_finite(self._where[name], name, values)
        return values

    def _grid(self, name: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return ((rows, columns) of a block, shape of the grid of blocks); raise GrpoError for other scales."""
        shape, scales = self.shape(name), self._scales[name]
        found, stored = self.shape(scales), self._slice(scales).get_dtype()
        if stored not in _FLOATS:
            raise GrpoError(
                f"{self._where[scales]}: tensor {scales} is stored as {stored}, but scales of {', '.join(_FLOATS)} are "
                f"supported: {_CURE}"
            )
        if len(shape) != 2:
            raise GrpoError(
                f"{self._where[name]}: tensor {name} of shape {shape} is no matrix, but has scales: {_CURE}"
            )
        if self._block is not None:
            rows, columns = self._block
            expected = -(-shape[0] // rows), -(-shape[1] // columns)
            if found == expected:
                return self._block, expected
            needed = f"{expected} for blocks of {rows} x {columns}"
        elif prod(found) == 1:
            return (shape[0], shape[1]), (1, 1)
        elif found in ((shape[0],), (shape[0], 1)):
            return (1, shape[1]), (shape[0], 1)
        else:
            needed = f"(1,) or {(shape[0], 1)}"
        raise GrpoError(
            f"{self._where[scales]}: tensor {scales} has shape {found}, but {name} of shape {shape} needs {needed}"
        )


class Mxfp4Safetensors(Safetensors):
    """Reader of a directory in which experts' matrices are stored as MXFP4: T_blocks and T_scales for tensor T.

    T_blocks is uint8 [experts, out, in / 32, 16], T_scales uint8 [experts, out, in / 32]. T is [experts, in, out], as
    in transformers' model.
    """

    quantization = "mxfp4"

    def __init__(self, hf_dir: str | Path):
        super().__init__(hf_dir)
        self._find_parts()

    def _find_parts(self) -> None:
        parts = [name for name in self._where if name.endswith(_SUFFIXES)]
        self._packed = {name.rpartition("_")[0]: name for name in parts}  # tensor -> one of its parts

    def names(self) -> Iterable[str]:
        return [*(name for name in self._where if not name.endswith(_SUFFIXES)), *self._packed]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return super().shape(name)
        experts, out, blocks, _ = self._blocks_shape(name)
        return experts, blocks * _MX_BLOCK, out

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` returns; raise GrpoError when a quantized tensor and its scales do not match."""
        if name not in self._packed:
            return super().dtype(name)
        blocks, scales = self._blocks_shape(name), f"{name}_scales"
        for part in (f"{name}_blocks", scales):
            if (stored := self._slice(part).get_dtype()) != "U8":
                raise GrpoError(f"{self._where[part]}: tensor {part} is stored as {stored}, but MXFP4 is stored as U8")
        if super().shape(scales) != blocks[:-1]:
            raise GrpoError(
                f"{self._where[scales]}: tensor {scales} has shape {super().shape(scales)}, but {name}_blocks of shape "
                f"{blocks} needs {blocks[:-1]}"
            )
        return torch.float32

    def read(self, name: str, index: tuple[int | slice, ...] = (slice(None),)) -> Tensor:
        """Return tensor[index] of one tensor, on the CPU; float32 if it is quantized. Slices have step 1."""
        if name not in self._packed:
            return super().read(name, index)
        experts, *matrix = self.shape(name)
        (top, bottom), (left, right) = _ranges(tuple(matrix), index[1:])
        if isinstance(index[0], int):
            return self._expert(name, index[0], top, bottom, left, right)
        chosen = range(*index[0].indices(experts))
        values = torch.empty(len(chosen), bottom - top, right - left)
        for place, expert in enumerate(chosen):
            values[place] = self._expert(name, expert, top, bottom, left, right)
        return values

    def _expert(self, name: str, expert: int, top: int, bottom: int, left: int, right: int) -> Tensor:
        """Return lines [top, bottom) and columns [left, right) of an expert's matrix [in, out]."""
        first, last = top // _MX_BLOCK, -(-bottom // _MX_BLOCK)
        part = expert, slice(left, right), slice(first, last)
        stored = super().read(f"{name}_scales", part)
        scales = _E8M0.index_select(0, stored.flatten().int()).view(*stored.shape, 1)
        _check_finite(self._where[f"{name}_scales"], f"{name}_scales", scales)
        packed = super().read(f"{name}_blocks", (*part, slice(None)))
        values = _PAIRS.index_select(0, packed.flatten().int()).view(*stored.shape, _MX_BLOCK)
        values *= scales
        _check_finite(self._where[f"{name}_blocks"], f"{name}_blocks", values)
        return values.flatten(1)[:, top - first * _MX_BLOCK : bottom - first * _MX_BLOCK].mT

    def _blocks_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor's blocks; raise GrpoError when a part is missing or the shape is not MXFP4's."""
        for suffix in _SUFFIXES:
            if name + suffix not in self._where:
                there = self._packed[name]
                raise GrpoError(
                    f"{self._where[there]} holds the tensor {there}, but no file holds {name + suffix}: a part of the "
                    "checkpoint is missing"
                )
        shape = super().shape(f"{name}_blocks")
        if len(shape) != 4 or 2 * shape[3] != _MX_BLOCK:
            raise GrpoError(
                f"{self._where[name + '_blocks']}: tensor {name}_blocks has shape {shape}, but MXFP4 has "
                f"(experts, out, in / {_MX_BLOCK}, {_MX_BLOCK // 2})"
            )
        return shape


class Int4Safetensors(Safetensors):
    """Reader of a directory in which some matrices are stored as compressed-tensors' packed 4-bit integers.

    T is stored as T_packed, int32 [out, in / 8] with the value q + 8 of column 8 i + j in bits 4 j to 4 j + 3, and
    T_scale [out, in / group]; T_shape has (out, in). The weight is q times the scale of its group.
    """

    def __init__(self, hf_dir: str | Path, group: int):
        super().__init__(hf_dir)
        self._group = group
        self.quantization = f"int4 in groups of {group}"
        self._find_parts()

    def _find_parts(self) -> None:
        packed = "_packed"
        self._packed = {name.removesuffix(packed) for name in self._where if name.endswith(packed)}
        self._parts = {name + part for name in self._packed for part in (packed, "_scale", "_shape")}

    def names(self) -> Iterable[str]:
        return [*(name for name in self._where if name not in self._parts), *self._packed]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return super().shape(name)
        rows, columns = super().shape(f"{name}_packed")
        return rows, columns * _PER_INT32

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` returns; raise GrpoError when a quantized tensor and its scales do not match."""
        if name not in self._packed:
            return super().dtype(name)
        packed, scale = f"{name}_packed", f"{name}_scale"
        if scale not in self._where:
            raise GrpoError(
                f"{self._where[packed]} holds the tensor {packed}, but no file holds {scale}: a part of the checkpoint "
                "is missing"
            )
        if (stored := self._slice(packed).get_dtype()) != "I32":
            raise GrpoError(f"{self._where[packed]}: tensor {packed} is stored as {stored}, but 4-bit integers as I32")
        rows, columns = self.shape(name)
        if super().shape(scale) != (rows, columns // self._group) or columns % self._group:
            raise GrpoError(
                f"{self._where[scale]}: tensor {scale} has shape {super().shape(scale)}, but {name} of shape "
                f"{(rows, columns)} has groups of {self._group}"
            )
        return torch.float32

    def read(self, name: str, index: tuple[int | slice, ...] = (slice(None),)) -> Tensor:
        """Return tensor[index] of one tensor, on the CPU; float32 if it is quantized. Slices have step 1."""
        if name not in self._packed:
            return super().read(name, index)
        (top, bottom), (left, right) = _ranges(self.shape(name), index)
        first, last = left // self._group, -(-right // self._group)  # groups that contain the slice
        per_group = self._group // _PER_INT32
        rows = slice(top, bottom)
        words = super().read(f"{name}_packed", (rows, slice(first * per_group, last * per_group)))
        scales = super().read(f"{name}_scale", (rows, slice(first, last))).float()
        _check_finite(self._where[f"{name}_scale"], f"{name}_scale", scales)
        values = (words[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
        whole = (values - 8).view(len(words), last - first, self._group) * scales[:, :, None]
        return whole.flatten(1)[:, left - first * self._group : right - first * self._group]


def _check_finite(file: Path, name: str, values: Tensor) -> None:
    least, largest = values.aminmax()  # NaN if one value is; unlike isfinite, without tensors of the same size
    if not (least.isfinite() and largest.isfinite()):
        raise InputError(f"{file}: tensor {name} holds values that are not finite: it is damaged")


def _ranges(shape: tuple[int, ...], index: tuple[int | slice, ...]) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each axis that an index of slices selects; axes without a slice are whole."""
    slices = (*index, *[slice(None)] * (len(shape) - len(index)))
    ranges = []
    for part, size in zip(slices, shape, strict=True):
        assert isinstance(part, slice)
        ranges.append(part.indices(size)[:2])
    return ranges
