"""Data files of a checkpoint (``*.distcp``): torch's format, with a checksum of every item.

A file consists of items, each written by torch.save or pickle. ``checksums.json`` in the same directory has their
lengths and checksums (xxh3, 64 bits), in the order of the file: ``{"__0_0.distcp": [[length, "hexadecimal"], ...]}``.
A reader checks each item just before it loads it: nothing is loaded unchecked, and the second read comes from the
page cache.

One item is the common state: the values without tensors that are equal on all ranks. Before megatron-core 0.19 it was
a file of its own, common.pt.
"""

import contextlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_grpo.checkpointing.checksums import CHECKSUMS, Checksum, read_checksums
from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import GrpoError

Data = torch.Tensor | io.BytesIO

_PIECE = 2**26  # bytes that are written between two signs of progress
_SYNCED = 2**30  # bytes after which a file is synchronised with the disk

COMMON_STATE = "common_state"  # megatron-core's key of the common state
COMMON_STATE_INDEX = MetadataIndex(f"{COMMON_STATE}/shard_0_1")  # its index among the items: the only shard


@dataclass(frozen=True)
class Written(WriteResult):
    """An item's place in a file, in torch's class, which rank 0 gathers from all ranks, and its checksum."""

    checksum: str = ""


class _ChecksumStream:
    """Writable file that also computes the checksum of what is written."""

    def __init__(self, stream: IO[bytes]):
        self.stream, self.checksum = stream, Checksum()

    def write(self, data) -> int:
        data = memoryview(data).cast("B")
        for begin in range(0, len(data), _PIECE):
            piece = data[begin : begin + _PIECE]
            self.checksum.update(piece)
            self.stream.write(piece)
            progress.advance()
        return len(data)

    def flush(self) -> None:
        self.stream.flush()


@contextlib.contextmanager
def file_errors() -> Iterator[None]:
    """Context that raises the error of a file: torch.save raises another one while it handles that of the file."""
    try:
        yield
    except RuntimeError as error:
        within: BaseException | None = error
        while within is not None and not isinstance(within, OSError):
            within = within.__context__
        raise within or error from None


def write_items(file: Path, items: Iterable[tuple[MetadataIndex, Data]]) -> list[Written]:
    """Write a data file to the disk (fsync); return the places and checksums of the items."""
    results: list[Written] = []
    synced = 0  # bytes that are known to be on the disk: the last fsync shows no progress
    crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # no reader checks it, and it takes longer than all other checksums
    try:
        with file_errors(), open(file, "wb") as stream:
            for index, data in items:
                start, checked = stream.tell(), _ChecksumStream(stream)
                if isinstance(data, torch.Tensor):
                    torch.save(data, cast(IO[bytes], checked))  # it needs write and flush alone
                else:
                    checked.write(data.getbuffer())
                length = stream.tell() - start
                info = _StorageInfo(file.name, start, length)
                if stream.tell() - synced > _SYNCED:
                    stream.flush()
                    os.fdatasync(stream.fileno())
                    synced = stream.tell()
                    progress.advance()
                results.append(Written(index, length, info, checked.checksum.text()))
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        torch.serialization.set_crc32_options(crc32)
    return results


def file_name(rank: int) -> str:
    """Return the name of a rank's data file."""
    return f"__{rank}_0{DEFAULT_SUFFIX}"


class Writer(torch_checkpoint.FileSystemWriter):
    """Torch's writer of checkpoints in this process: one data file a rank, checksums.json and metadata.json.

    An error of any rank is raised on all.
    """

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return torch's plan, on rank 0; raise GrpoError if the tensors are larger than the free space of the disk."""
        data = (item.tensor_data for plan in plans for item in plan.items)
        need = sum(math.prod(d.chunk.sizes) * d.properties.dtype.itemsize for d in data if d is not None)
        free = shutil.disk_usage(self.path).free
        if need > free:
            raise GrpoError(f"the disk is full: it needs {need / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write this rank's items; the next tensor is copied from the device meanwhile."""
        file = Path(self.path, f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}")
        done: Future[list[WriteResult]] = Future()
        done.set_result(list(write_items(file, _prefetched(planner, plan.items))))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the files that describe the data, on rank 0."""
        # megatron-core's CheckpointingConfig. The process of background saves runs this, and needs no megatron-core.
        kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        Path(self.path, "metadata.json").write_text(json.dumps(kind))
        write_checksums(Path(self.path), [cast(Written, item) for of_rank in results for item in of_rank])
        super().finish(metadata, results)


def write_checksums(directory: Path, written: Sequence[Written]) -> None:
    """Write checksums.json for the items of all data files of a directory."""
    files: dict[str, list] = {}
    for item in sorted(written, key=lambda item: item.storage_data.offset):
        files.setdefault(item.storage_data.relative_path, []).append([item.size_in_bytes, item.checksum])
    (directory / CHECKSUMS).write_text(json.dumps(files) + "\n")


def _prefetched(planner: Any, items: Sequence[WriteItem]) -> Iterator[tuple[MetadataIndex, Data]]:
    """Yield (index, data on the host) of each item; a thread copies the next one from the device meanwhile."""
    with ThreadPoolExecutor(1) as copies:
        coming = None
        for item in items:
            following = item.index, copies.submit(on_host, planner, item)
            if coming is not None:
                yield coming[0], coming[1].result()
            coming = following
        if coming is not None:
            yield coming[0], coming[1].result()


def on_host(planner: Any, item: WriteItem) -> Data:
    """Return an item's bytes, or its tensor on the host in the dtype of the plan.

    The tensor has a storage of its own, because torch.save writes whole storages.
    """
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        return data
    assert item.tensor_data is not None
    tensor = data.detach().cpu().to(item.tensor_data.properties.dtype)  # converted on the host: see SavePlanner
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Reader(torch_checkpoint.FileSystemReader):
    """Torch's reader, which compares every item with its checksum before it is loaded; metadata is read once.

    Without checksums.json (in checkpoints of earlier versions and of Megatron-LM) nothing is compared.
    """

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        self._metadata: Metadata | None = None
        self._expected = read_checksums(Path(path))
        self._checked: set[tuple[str, int]] = set()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return torch's metadata of the checkpoint."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def common_state(self) -> dict[str, Any]:
        """Return the common state.

        It is read with torch's ``weights_only``: plain values, and the types that megatron-core registers as safe
        (Namespace, enumerations, arrays: megatron/core/safe_globals.py). Raises GrpoError, which names any other type.
        """
        file = Path(self.path, "common.pt")
        place = self.read_metadata().storage_data.get(COMMON_STATE_INDEX)
        try:
            if place is None or file.exists():  # megatron-core prefers the file, too
                return torch.load(file, map_location="cpu", weights_only=True)
            file = file.with_name(place.relative_path)
            with file.open("rb") as data:
                content = io.BytesIO(self.checked_view(data, place).read())
            (common,) = torch.load(content, map_location="cpu", weights_only=True)
            return common
        except FileNotFoundError as error:
            raise GrpoError(f"checkpoint {self.path} has no common state: {error.filename} is missing") from None
        except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            cause = f"it holds a {found[1]}, which could run code" if found else str(error).splitlines()[0]
            raise GrpoError(f"{file} cannot be read: {cause}") from None

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        return self.checked_view(file, sinfo)

    def checked_view(self, file: IO[bytes], place: _StorageInfo) -> IO[bytes]:
        """Return an item of an open file as a file; raise GrpoError unless the item has its checksum."""
        if self._expected is not None and (place.relative_path, place.offset) not in self._checked:
            length, checksum = self._expected.get(place.relative_path, {}).get(place.offset, (None, None))
            file.seek(place.offset)
            if length != place.length or Checksum.of(file, place.length) != checksum:
                raise GrpoError(self._damage(place))
            self._checked.add((place.relative_path, place.offset))
        progress.advance()
        return super()._slice_file(file, place)

    def _damage(self, place: _StorageInfo) -> str:
        stored = self.read_metadata().storage_data
        holds = next((index.fqn for index, info in stored.items() if info == place), "an item")
        return (
            f"the content of {place.relative_path} has changed since it was written: {holds}, in bytes {place.offset} "
            f"to {place.offset + place.length}"
        )
