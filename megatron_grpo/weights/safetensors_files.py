"""Safetensors directories: read slices of tensors; write tensors in place from any number of processes.

A safetensors file (huggingface.co/docs/safetensors) is a header with the byte range of each tensor, then the bytes. The
headers of a model depend on names, shapes and dtypes only, so every process can compute all of them. The process that
holds a tensor, or one of its equal parts along the first axis, writes it at its offset. No extra gather is needed, each
process holds one tensor at a time, and the files are the same byte for byte for any number of processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import GrpoError, InputError
from megatron_grpo.utils.json_files import read_json_object

INDEX = "model.safetensors.index.json"
CHECKSUMS = "checksums.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Rows:
    """Some rows of one expert's matrix in a stacked tensor ``[experts, rows, columns]``, as a slice of safetensors."""

    def __init__(self, stacked: Any, expert: int, begin: int, end: int):
        self._stacked, self._expert, self._rows = stacked, expert, range(begin, end)

    def get_shape(self) -> list[int]:
        return [len(self._rows), *self._stacked.get_shape()[2:]]

    def get_dtype(self) -> str:
        return self._stacked.get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        rows = self._rows[index[0]]
        return self._stacked[(self._expert, slice(rows.start, rows.stop, rows.step), *index[1:])]


class Safetensors:
    """Reader of a directory with model.safetensors, or with several files and their index.

    The constructor reads headers only. Every error names the file, and the tensor when there is one.
    """

    index, single = INDEX, "model.safetensors"
    quantization: str | None = None  # format of weights that `read` dequantizes

    def __init__(self, hf_dir: str | Path):
        self.dir = Path(hf_dir)
        self._files: dict[Path, Any] = {}
        self._stored: dict[str, str] = {}  # names in the files, where `rename` has given others
        self._unstacked: dict[str, tuple[str, int, int, int]] = {}  # of `unstack`: arguments of `_Rows`
        index = self.dir / self.index
        if index.exists():
            try:
                weight_map = read_json_object(index)["weight_map"]
                self._where = {name: self.dir / file for name, file in weight_map.items()}
            except (KeyError, TypeError, AttributeError) as error:
                raise GrpoError(f"{index} is not an index of tensors: {error!r}") from None
        elif (single := self.dir / self.single).exists():
            self._where = dict.fromkeys(self._open(single).keys(), single)
        elif type(self) is Safetensors and (found := sorted(self.dir.glob("pytorch_model*.bin"))):
            raise GrpoError(
                f"{found[0]} is a pickle, which can run code when it is read: save the model as safetensors "
                f"(model.save_pretrained(DIR) in transformers) and give that directory, or have "
                f"tools/checkpoint/convert.py --pytorch-bin read its tensors and nothing else"
            )
        else:
            raise GrpoError(f"{self.dir} holds neither {self.single} nor {self.index}")

    def rename(self, published: Callable[[str], str | None]) -> list[str]:
        """Give the tensors other names, those that ``published`` returns; return those that it leaves out (None)."""
        unread = sorted(name for name in self._where if published(name) is None)
        self._stored = {new: name for name in self._where if (new := published(name)) is not None}
        self._where = {new: self._where[name] for new, name in self._stored.items()}
        self._find_parts()
        return unread

    def unstack(self, name: str, parts: Sequence[str]) -> None:
        """Give the matrices of each expert in a tensor ``[experts, rows, columns]`` names; no-op without the tensor.

        ``parts``: name patterns with "{expert}" of matrices that share the rows equally, in order.
        """
        if name not in self._where:
            return
        experts, rows = self.shape(name)[0], self.shape(name)[1] // len(parts)
        found = {
            part.format(expert=expert): (name, expert, number * rows, (number + 1) * rows)
            for expert in range(experts)
            for number, part in enumerate(parts)
        }
        self._unstacked |= found
        self._where |= dict.fromkeys(found, self._where.pop(name))

    def _find_parts(self) -> None:
        """Find the tensors that are stored in parts; called whenever the names have changed."""

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype; raise GrpoError unless it is in _DTYPES: weights/quantized.py reads others."""
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise GrpoError(
                f"{self._where[name]}: tensor {name} is stored as {stored}: convert the model to one of "
                f"{', '.join(_DTYPES)} first, or restore the quantization_config of config.json if it was removed"
            )
        return _DTYPES[stored]

    def read(self, name: str, index: tuple[int | slice, ...] = (slice(None),)) -> Tensor:
        """Return tensor[index] of one tensor, on the CPU; read only these bytes."""
        try:
            return self._slice(name)[index]
        except SafetensorError as error:
            raise InputError(f"{self._where[name]}: tensor {name} cannot be read: {error}") from None

    def _slice(self, name: str) -> Any:
        path, (stored, *rows) = self._where[name], self._unstacked.get(name, (name,))
        try:
            found = self._open(path, name).get_slice(self._stored.get(stored, stored))
            return _Rows(found, *rows) if rows else found
        except SafetensorError:
            raise InputError(f"{path} does not hold the tensor {name}, which {self.index} places there") from None

    def _open(self, path: Path, wanted: str | None = None) -> Any:
        if path not in self._files:
            asked = f" (needed for tensor {wanted})" if wanted else ""
            try:
                self._files[path] = self._load(path)
            except FileNotFoundError:  # of safetensors also without permission
                missing = "cannot be read" if path.exists() else "does not exist"
                cause = (
                    "change its permissions"
                    if path.exists()
                    else "a shard of the checkpoint is missing; copy or download it again"
                )
                raise InputError(f"{path} {missing}{asked}: {cause}") from None
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path} is truncated or not a safetensors file{asked}: {error}") from None
        return self._files[path]

    def _load(self, path: Path) -> Any:
        return safe_open(path, framework="pt", device="cpu")


class PytorchBin(Safetensors):
    """Reader of pytorch_model.bin, or of several such files and their index, with the interface of Safetensors.

    The files are pickles. torch.load reads them with `weights_only`, which refuses everything but tensors, and with
    `mmap`, so that a file is not read as a whole.
    """

    index, single = "pytorch_model.bin.index.json", "pytorch_model.bin"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._slice(name).dtype
        if dtype not in _NAMES:
            raise GrpoError(f"{self._where[name]}: tensor {name} has dtype {dtype}: convert the model to bf16 first")
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
            raise GrpoError(
                f"{path} holds more than tensors, is truncated, or is not a file of torch.save: {cause}"
            ) from None
        if not isinstance(found, dict):
            raise GrpoError(f"{path} holds a {type(found).__name__}, not a dictionary of tensors")
        return found


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with the permissions of other new files; the library's lets its own user read only."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


class PlannedFile(NamedTuple):
    """A file to write: header, size in bytes, and for each tensor (offset in the file, number of bytes)."""

    name: str
    header: bytes
    size: int
    places: dict[str, tuple[int, int]]


def plan_files(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], max_bytes: int) -> list[PlannedFile]:
    """Distribute tensors, in order, over files of at most `max_bytes` each; a larger tensor has a file of its own."""
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
    # Largest dtypes first, so that every tensor begins at a multiple of its element size.
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
    """Writer of planned files in a directory; each tensor is written at its offset.

    One process calls `claim` and `create` before any process calls `write`, and `release` or `discard` at the end.
    `checksums`: those of the tensors that this process wrote. Raises OSError when writing fails.
    """

    def __init__(self, directory: Path, files: Iterable[PlannedFile]):
        self.directory, self.files = directory, list(files)
        self.checksums: dict[str, dict[int, int]] = {}  # tensor -> number of the part -> zlib.crc32 of its bytes
        self._places = {name: (file.name, *place) for file in self.files for name, place in file.places.items()}
        self._open: dict[str, int] = {}
        self._claim: int | None = None

    def claim(self) -> None:
        """Lock the directory, which is made if needed, and delete what a killed process left in it.

        Raises GrpoError if another process has it.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        claim = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(claim)
            raise GrpoError(
                f"another export is writing {self.directory}: wait for its end, or choose another directory"
            ) from None
        except OSError:  # a file system without locks
            pass
        self._claim = claim
        for path in self.directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def release(self) -> None:
        """End the claim; nothing without one."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def discard(self) -> None:
        """Delete the directory, if this process has claimed it."""
        if self._claim is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.release()

    def create(self) -> None:
        """Create the files with their headers, at full size."""
        for file in self.files:
            with open(self.directory / file.name, "wb") as out:
                out.write(file.header)
                out.truncate(file.size)

    def write(self, name: str, tensor: Tensor, part: int = 0, parts: int = 1) -> None:
        """Write a tensor of the planned dtype, or part number `part` of `parts` equal parts along its first axis."""
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
            progress.advance()

    def close(self) -> None:
        """Flush what this process wrote to the disk (fsync), and close the files."""
        while self._open:
            _, descriptor = self._open.popitem()
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def write_index(directory: Path, files: list[PlannedFile]) -> None:
    """Write the index of several files; do nothing for a single file, which needs none."""
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.places}
        total = sum(size for file in files for _, size in file.places.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_checksums(directory: Path, checksums: Mapping[str, Mapping[int, int]]) -> None:
    """Write checksums.json: tensor -> CRC-32 of each of its equal parts (most have one), in hexadecimal."""
    found = {name: [f"{parts[i]:08x}" for i in range(len(parts))] for name, parts in sorted(checksums.items())}
    (directory / CHECKSUMS).write_text(json.dumps({"crc32": found}, indent=0) + "\n")


def check_checksums(source: Safetensors) -> int:
    """Compare all tensors with checksums.json; return the number compared, 0 without such a file.

    Raises GrpoError, which names the first tensor with another checksum.
    """
    path = source.dir / CHECKSUMS
    if not path.exists():
        return 0
    try:
        expected = json.loads(path.read_text())["crc32"]
        pairs = [(name, [int(part, 16) for part in parts]) for name, parts in expected.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GrpoError(f"{path} holds no checksums: {error!r}; remove the file to skip this check") from None
    for name, parts in pairs:
        if name not in source.names():
            raise GrpoError(f"{path} names the tensor {name}, which {source.dir} does not hold")
        found = [zlib.crc32(memoryview(part.view(torch.uint8).numpy())) for part in _parts(source, name, len(parts))]
        if found != parts:
            raise GrpoError(f"{source.dir}: the bytes of tensor {name} are not those that were written ({CHECKSUMS})")
    return len(pairs)


def _parts(source: Safetensors, name: str, parts: int) -> Iterator[Tensor]:
    """Yield the tensor in `parts` equal parts along its first axis, each flattened."""
    if parts == 1:
        yield source.read(name).contiguous().reshape(-1)
        return
    share = source.shape(name)[0] // parts
    for part in range(parts):
        yield source.read(name, (slice(part * share, (part + 1) * share),)).contiguous().reshape(-1)
