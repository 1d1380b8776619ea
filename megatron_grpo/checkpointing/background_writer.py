"""Process that writes a rank's part of a checkpoint while training goes on: background.py has the trainer's side.

    python -m megatron_grpo.checkpointing.background_writer DESCRIPTOR

It reads jobs from the socket DESCRIPTOR: the length of a pickle, with the descriptors of the shared memory that holds
the tensors, then the pickle of a `Job`. The answer to each is one line of JSON, {"error": text or null}. The process
ends with the rank that started it.

Every rank's process writes its data file, and beside it a list of what it has written, and answers. The process of rank
0 waits for all lists, writes the files that describe them, publishes the checkpoint, and answers then.
"""

import contextlib
import json
import mmap
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from megatron_grpo.utils.process_tree import end_with_parent

LENGTH = struct.Struct("Q")
MOST_BUFFERS = 16
_LONGEST_PAUSE = 1.0  # seconds between two checks for files of other ranks, which all hosts' file server answers


@dataclass
class Item:
    """An item of a data file in a buffer: ``dtype`` None for bytes."""

    index: Any  # torch's MetadataIndex
    start: int
    size: int
    dtype: Any = None
    shape: tuple[int, ...] = ()


@dataclass
class Part:
    """A data file of this rank.

    On rank 0 also torch's metadata of the file's directory, and the number of ranks that write there.
    """

    file: Path
    items: list[Item]
    metadata: Any = None
    world_size: int = 1


@dataclass
class Job:
    """A checkpoint to write into the directory ``temporary``: one part for each buffer, in the same order.

    ``args``, ``keep`` and ``best`` are arguments of `checkpoint_directory.publish` on rank 0; None on the others.
    """

    temporary: Path
    parts: list[Part] = field(default_factory=list)
    args: dict[str, Any] | None = None
    keep: int | None = None
    best: dict[str, Any] | None = None


def listing(file: Path) -> Path:
    """Return the file with the list of what a rank has written into a data file."""
    return file.with_name(f"{file.name}.written.json")


def pauses() -> Iterator[float]:
    """Yield seconds between two checks for a file: 0.05 at first, then a twentieth of the time so far, at most 1."""
    so_far = 0.0
    while True:
        pause = min(max(0.05, so_far / 20), _LONGEST_PAUSE)
        yield pause
        so_far += pause


def report_failure(job: Job, message: str) -> None:
    """Write the reason why this rank's part is missing where rank 0's process looks for the list of its items."""
    for part in job.parts:
        part.file.unlink(missing_ok=True)  # room for the message
        try:
            _write_whole(listing(part.file), {"error": message})
        except OSError:
            listing(part.file).touch()  # needs no space: `_describe`


def main() -> None:
    """Write jobs from the socket until its other end is closed."""
    end_with_parent()
    jobs = socket.socket(fileno=int(sys.argv[1]))
    import torch.distributed.checkpoint  # noqa: F401  here, and before the first job: it takes seconds

    os.nice(5)
    while True:
        header, descriptors, _, _ = socket.recv_fds(jobs, LENGTH.size, MOST_BUFFERS)
        if not header:
            return
        (left,), data = LENGTH.unpack(header), bytearray()
        while left > len(data):
            data += jobs.recv(min(left - len(data), 2**20))
        job: Job = pickle.loads(data)
        try:
            _write(job, descriptors)
            error = None
        except Exception as cause:  # the trainer raises it, on all ranks
            error = str(cause) or repr(cause)
            with contextlib.suppress(OSError):  # rank 0's process has deleted the directory, or nobody can write there
                report_failure(job, error)
        for descriptor in descriptors:
            os.close(descriptor)
        jobs.sendall(json.dumps({"error": error}).encode() + b"\n")


def _write(job: Job, descriptors: list[int]) -> None:
    from megatron_grpo.checkpointing import checkpoint_directory, data_files

    for part, descriptor in zip(job.parts, descriptors, strict=True):
        with mmap.mmap(descriptor, 0) as memory:
            written = data_files.write_items(part.file, _items(memory, part.items))
            rows = [[item.storage_data.offset, item.size_in_bytes, item.checksum] for item in written]
            indices = [[i.index.fqn, i.index.offset and list(i.index.offset), i.index.index] for i in written]
            del written
        _write_whole(listing(part.file), {"items": [[*index, *row] for index, row in zip(indices, rows, strict=True)]})
    if job.args is None:
        return
    try:
        for part in job.parts:
            _describe(part)
        checkpoint_directory.publish(job.temporary, job.args, job.keep, job.best)
    except BaseException:
        checkpoint_directory.discard(job.temporary)
        raise


def _items(memory: mmap.mmap, items: list[Item]) -> Iterator[tuple[Any, Any]]:
    import torch

    for item in items:
        if item.dtype is None:
            yield item.index, BytesIO(memory[item.start : item.start + item.size])
        elif item.size == 0:
            yield item.index, torch.empty(item.shape, dtype=item.dtype)
        else:
            count = item.size // item.dtype.itemsize
            flat = torch.frombuffer(memory, dtype=item.dtype, count=count, offset=item.start)
            tensor = flat.view(item.shape)
            yield item.index, tensor if tensor.untyped_storage().nbytes() == item.size else tensor.clone()
            del flat, tensor  # the memory cannot be closed before


def _describe(part: Part) -> None:
    """Wait for the data files of all ranks; write the files that describe them."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.storage import WriteResult

    from megatron_grpo.checkpointing import data_files
    from megatron_grpo.utils.errors import GrpoError

    directory = part.file.parent
    results: list[WriteResult] = []
    for rank in range(part.world_size):
        file = directory / data_files.file_name(rank)
        for pause in pauses():
            if listing(file).exists():
                break
            if not directory.exists():
                raise GrpoError(f"{directory} was deleted")
            time.sleep(pause)
        text = listing(file).read_text()
        written: dict[str, Any] = json.loads(text or '{"error": "it could write neither its part nor the reason"}')
        if "error" in written:
            raise GrpoError(f"rank {rank}: {written['error']}")
        for fqn, offset, index, start, length, checksum in written["items"]:
            place = MetadataIndex(fqn, None if offset is None else torch.Size(offset), index)
            info = _StorageInfo(file.name, start, length)
            results.append(data_files.Written(place, length, info, checksum))
        listing(file).unlink()
    data_files.Writer(directory).finish(part.metadata, [results])


def _write_whole(file: Path, content: dict[str, Any]) -> None:
    temporary = file.with_name(f"{file.name}.partial")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, file)


if __name__ == "__main__":
    # The pickles name this module's classes.
    from megatron_grpo.checkpointing import background_writer

    background_writer.main()
