"""Files of records that are only appended to; each record is flushed to the disk (fsync) before the next is written.

    magic         8 bytes
    sizes         <IQQQ: bytes of the head, bytes of the arrays, xxh3 of the head and these sizes, xxh3 of the arrays
    head          JSON; ``arrays`` lists name, dtype and shape of each array
    arrays        one after the other, C order, little-endian

A kill or a crash of the host leaves at most one torn record, the last one, which readers ignore. Damage before the last
record raises GrpoError with the file and the position. No pickles. This module imports no torch.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_grpo.utils.durable import flush_to_disk
from megatron_grpo.utils.errors import GrpoError

MAGIC = b"\x93grpoled"
_SIZES = struct.Struct("<IQQQ")
_START = len(MAGIC) + _SIZES.size

Arrays = Mapping[str, npt.NDArray[Any]]


class Record(NamedTuple):
    """A record of a file, without its arrays: `read_arrays`."""

    file: Path
    offset: int  # of the record
    end: int
    head: dict[str, Any]


class RecordFile:
    """A new file of records, open for appending."""

    def __init__(self, path: Path):
        self.path, self._end = path, 0
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  (closed by `close`)
        try:
            flush_to_disk(path.parent)
        except OSError:
            self._file.close()
            raise

    def append(self, head: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        """Write a record and flush it to the disk. After an OSError the file holds what it held before."""
        data = to_bytes(head, arrays or {})
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.seek(self._end)
            self._file.truncate()
            raise
        self._end += len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def to_bytes(head: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Return a record."""
    parts = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    described = [[name, array.dtype.newbyteorder("<").str, array.shape] for name, array in parts.items()]
    text = json.dumps(dict(head) | {"arrays": described}).encode()
    payload = b"".join(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in parts.values())
    sizes = len(text), len(payload), _checksum_of_head(text, len(payload)), xxhash.xxh3_64_intdigest(payload)
    return MAGIC + _SIZES.pack(*sizes) + text + payload


def scan(file: Path) -> Iterator[Record]:
    """Yield the records of a file in order; ignore a torn last one, and raise GrpoError for damage before it.

    Reads only the heads. The arrays are checked by `read_arrays`, those of the last record here.
    """
    try:
        with open(file, "rb") as stream:
            size, offset = os.fstat(stream.fileno()).st_size, 0
            while offset < size:
                record = _record_at(stream, file, offset)
                if record is None:
                    if later := _next_record(stream, file, offset + 1):
                        raise GrpoError(_damaged(file, offset, f"there is another record at byte {later.offset}"))
                    return
                if record.end > size or (record.end == size and not _whole(stream, record)):
                    return
                yield record
                offset = record.end
    except OSError as error:
        raise GrpoError(f"{file} cannot be read: {error.strerror}") from error


def read_arrays(file: Path, offset: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of the record at ``offset``; raises GrpoError if it is damaged."""
    try:
        with open(file, "rb") as stream:
            record = _record_at(stream, file, offset)
            if record is None:
                raise GrpoError(_damaged(file, offset, "its head has changed since it was written"))
            if not _whole(stream, record):
                raise GrpoError(_damaged(file, offset, "its arrays have changed since they were written"))
            arrays, position = {}, record.end - _payload_size(record)
            for name, dtype, shape in record.head["arrays"]:
                count = int(np.prod(shape, dtype=np.int64))
                stream.seek(position)
                data = stream.read(count * np.dtype(dtype).itemsize)
                arrays[name] = np.frombuffer(data, dtype).reshape(shape)
                position += len(data)
            return arrays
    except OSError as error:
        raise GrpoError(f"{file} cannot be read: {error.strerror}") from error


def _record_at(stream: IO[bytes], file: Path, offset: int) -> Record | None:
    """Return the record at ``offset``, of which only the head is checked; None if there is none."""
    stream.seek(offset)
    start = stream.read(_START)
    if len(start) < _START or not start.startswith(MAGIC):
        return None
    head_size, payload_size, checksum, _ = _SIZES.unpack(start[len(MAGIC) :])
    text = stream.read(head_size)
    if len(text) < head_size or _checksum_of_head(text, payload_size) != checksum:
        return None
    return Record(file, offset, offset + _START + head_size + payload_size, json.loads(text))


def _next_record(stream: IO[bytes], file: Path, offset: int) -> Record | None:
    """Return the first record that begins at ``offset`` or later; None if there is none."""
    stream.seek(offset)
    rest, place = stream.read(), -1
    while (place := rest.find(MAGIC, place + 1)) >= 0:
        if record := _record_at(stream, file, offset + place):
            return record
    return None


def _whole(stream: IO[bytes], record: Record) -> bool:
    """Return whether the arrays of a record have their checksum."""
    stream.seek(record.offset + len(MAGIC))
    *_, checksum = _SIZES.unpack(stream.read(_SIZES.size))
    size = _payload_size(record)
    stream.seek(record.end - size)
    return xxhash.xxh3_64_intdigest(stream.read(size)) == checksum


def _payload_size(record: Record) -> int:
    return sum(
        int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for _, dtype, shape in record.head["arrays"]
    )


def _checksum_of_head(text: bytes, payload_size: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<IQ", len(text), payload_size) + text)


def _damaged(file: Path, offset: int, problem: str) -> str:
    return (
        f"{file} is damaged: the record at byte {offset} cannot be read, and {problem}; restore the file, or move its "
        "directory away (the run then goes on from its checkpoint alone)"
    )
