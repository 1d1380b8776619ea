"""Safetensors directories: tensors read by slices, and written in place by any number of processes.

The format (huggingface.co/docs/safetensors) is a header that says where each tensor's bytes lie, then the bytes. The
headers of a model follow from names, shapes and dtypes alone. So every process knows all of them, and whoever holds a
tensor, or one of its parts along the first axis, writes it to its place: nothing is gathered that need not be, nothing
is held but the tensor at hand, and the files are the same byte for byte whoever writes them.
"""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_grpo.utils.errors import GrpoError

INDEX = "model.safetensors.index.json"
CHECKSUMS = "checksums.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Safetensors:
    """The tensors of a directory with model.safetensors, or shards and their index: names, shapes, and slices.

    Only headers are read at first. Every error names the file, and the tensor when there is one.
    """

    index, single = INDEX, "model.safetensors"

    def __init__(self, hf_dir: str | Path):
        self.dir = Path(hf_dir)
        self._files: dict[Path, Any] = {}
        index = self.dir / self.index
        if index.exists():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
                self._where = {name: self.dir / file for name, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise GrpoError(f"{index} is not an index of tensors: {error!r}") from None
        elif (single := self.dir / self.single).exists():
            self._where = dict.fromkeys(self._open(single).keys(), single)
        elif type(self) is Safetensors and (found := sorted(self.dir.glob("pytorch_model*.bin"))):
            raise GrpoError(
                f"{found[0]} is a pickle, which can run code when read: save the model as safetensors "
                f"(model.save_pretrained(DIR) in transformers) and give that directory, or have "
                f"tools/checkpoint/convert.py --pytorch-bin read its tensors and nothing else"
            )
        else:
            raise GrpoError(f"{self.dir} holds neither {self.single} nor {self.index}")

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """GrpoError for other numbers than plain floating-point ones: quantised weights have scales elsewhere."""
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise GrpoError(
                f"{self._where[name]}: tensor {name} is stored as {stored}: convert the model to one of "
                f"{', '.join(_DTYPES)} first"
            )
        return _DTYPES[stored]

    def read(self, name: str, index: tuple[int | slice, ...] = (slice(None),)) -> Tensor:
        """tensor[index] of one tensor, on the CPU; no other bytes are read."""
        try:
            return self._slice(name)[index]
        except SafetensorError as error:
            raise GrpoError(f"{self._where[name]}: tensor {name} cannot be read: {error}") from None

    def _slice(self, name: str) -> Any:
        path = self._where[name]
        try:
            return self._open(path, name).get_slice(name)
        except SafetensorError:
            raise GrpoError(f"{path} does not hold the tensor {name}, which {self.index} places there") from None

    def _open(self, path: Path, wanted: str | None = None) -> Any:
        if path not in self._files:
            asked = f" (needed for tensor {wanted})" if wanted else ""
            try:
                self._files[path] = self._load(path)
            except FileNotFoundError:
                raise GrpoError(f"{path} does not exist{asked}: a shard of the checkpoint is missing") from None
            except (SafetensorError, OSError) as error:
                raise GrpoError(f"{path} is truncated or no safetensors file{asked}: {error}") from None
        return self._files[path]

    def _load(self, path: Path) -> Any:
        return safe_open(path, framework="pt", device="cpu")


class PytorchBin(Safetensors):
    """The tensors of pytorch_model.bin, or of shards and their index, in the same way.

    The files are pickles. They are read with torch's `weights_only`, which makes tensors and refuses everything else,
    and mapped into memory rather than read whole.
    """

    index, single = "pytorch_model.bin.index.json", "pytorch_model.bin"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._slice(name).dtype
        if dtype not in _NAMES:
            raise GrpoError(f"{self._where[name]}: tensor {name} is of {dtype}: convert the model to bf16 first")
        return dtype

    def _slice(self, name: str) -> Tensor:
        path = self._where[name]
        tensors = self._open(path, name)
        if not isinstance(tensors.get(name), Tensor):
            raise GrpoError(f"{path} does not hold the tensor {name}, which {self.index} places there")
        return tensors[name]

    def _load(self, path: Path) -> dict[str, Tensor]:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            cause = str(error).splitlines()[0] if str(error) else repr(error)
            raise GrpoError(f"{path} holds more than tensors, is truncated or no file of torch's: {cause}") from None
        if not isinstance(found, dict):
            raise GrpoError(f"{path} holds a {type(found).__name__}, not a dictionary of tensors")
        return found


class PlannedFile(NamedTuple):
    """A file to be: its header, its size in bytes, and where in it each tensor's bytes begin and how many they are."""

    name: str
    header: bytes
    size: int
    places: dict[str, tuple[int, int]]


def plan_files(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], max_bytes: int) -> list[PlannedFile]:
    """Files of at most `max_bytes` (one tensor, if that is larger) for tensors of these shapes and dtypes, in order."""
    shards: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}]
    total = 0
    for name, (shape, dtype) in tensors.items():
        size = prod(shape) * dtype.itemsize
        if shards[-1] and total + size > max_bytes:
            shards.append({})
            total = 0
        shards[-1][name] = shape, dtype
        total += size
    if len(shards) == 1:
        return [_planned("model.safetensors", shards[0])]
    return [_planned(f"model-{i:05d}-of-{len(shards):05d}.safetensors", shard) for i, shard in enumerate(shards, 1)]


def _planned(file: str, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> PlannedFile:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    # Large elements first, so that every tensor begins at a multiple of its element's size.
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
        size = prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        places[name] = end, size
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return PlannedFile(
        file,
        len(text).to_bytes(8, "little") + text,
        start + end,
        {name: (start + offset, size) for name, (offset, size) in places.items()},
    )


class SafetensorsWriter:
    """Writes planned files in a directory, each tensor at its place; `checksums` are those of what was written here.

    One process calls `create` before any process writes. OSError when the disk refuses.
    """

    def __init__(self, directory: Path, files: Iterable[PlannedFile]):
        self.directory, self.files = directory, list(files)
        self.checksums: dict[str, dict[int, int]] = {}  # by tensor and number of the part: zlib.crc32 of its bytes
        self._places = {name: (file.name, *place) for file in self.files for name, place in file.places.items()}
        self._open: dict[str, int] = {}

    def create(self) -> None:
        """Make the files with their headers, at their full size."""
        for file in self.files:
            with open(self.directory / file.name, "wb") as out:
                out.write(file.header)
                out.truncate(file.size)

    def write(self, name: str, tensor: Tensor, part: int = 0, parts: int = 1) -> None:
        """Write a tensor of the planned dtype, or number `part` of its `parts` equal parts along the first axis."""
        file, offset, size = self._places[name]
        data = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        assert len(data) * parts == size, f"{name}: {len(data)} bytes x {parts}, but {size} were planned"
        if file not in self._open:
            self._open[file] = os.open(self.directory / file, os.O_WRONLY)
        self.checksums.setdefault(name, {})[part] = zlib.crc32(data)
        offset += part * len(data)
        while data:
            written = os.pwrite(self._open[file], data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        """Bring what was written here to the disk."""
        while self._open:
            _, descriptor = self._open.popitem()
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def write_index(directory: Path, files: list[PlannedFile]) -> None:
    """Write the index of several files; a single one needs none."""
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.places}
        total = sum(size for file in files for _, size in file.places.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_checksums(directory: Path, checksums: Mapping[str, Mapping[int, int]]) -> None:
    """Write checksums.json: for each tensor the CRC-32 of each of its equal parts (most have one), as hexadecimals."""
    found = {name: [f"{parts[i]:08x}" for i in range(len(parts))] for name, parts in sorted(checksums.items())}
    (directory / CHECKSUMS).write_text(json.dumps({"crc32": found}, indent=0) + "\n")


def check_checksums(source: Safetensors) -> int:
    """Compare all tensors with checksums.json, where the directory has one; returns how many were compared.

    Raises GrpoError naming the first tensor whose bytes are not those that were written.
    """
    path = source.dir / CHECKSUMS
    if not path.exists():
        return 0
    try:
        expected = json.loads(path.read_text())["crc32"]
        pairs = [(name, [int(part, 16) for part in parts]) for name, parts in expected.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GrpoError(f"{path} holds no checksums: {error!r}; remove it to go on without") from None
    for name, parts in pairs:
        if name not in source.names():
            raise GrpoError(f"{path} names the tensor {name}, which {source.dir} does not hold")
        found = [zlib.crc32(memoryview(part.view(torch.uint8).numpy())) for part in _parts(source, name, len(parts))]
        if found != parts:
            raise GrpoError(f"{source.dir}: the bytes of tensor {name} are not those that were written ({CHECKSUMS})")
    return len(pairs)


def _parts(source: Safetensors, name: str, parts: int) -> Iterator[Tensor]:
    """The tensor in so many equal parts along its first axis, flat."""
    if parts == 1:
        yield source.read(name).contiguous().reshape(-1)
        return
    share = source.shape(name)[0] // parts
    for part in range(parts):
        yield source.read(name, (slice(part * share, (part + 1) * share),)).contiguous().reshape(-1)
