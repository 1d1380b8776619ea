"""Checksums of a checkpoint's files: xxh3 with 64 bits, which finds damage, and is no protection against forgery."""

import json
from pathlib import Path
from typing import IO

import xxhash

from megatron_grpo.utils.errors import GrpoError

CHECKSUMS = "checksums.json"  # of the items of data files, in their directory
_BLOCK = 2**24  # bytes that are read at a time


class Checksum:
    """Checksum of bytes that come in parts."""

    def __init__(self, data: bytes = b""):
        self._hash = xxhash.xxh3_64(data)

    def update(self, data) -> None:
        """Add bytes, in any object with a buffer."""
        self._hash.update(data)

    def text(self) -> str:
        """Return the checksum in hexadecimal."""
        return self._hash.hexdigest()

    @classmethod
    def of(cls, file: IO[bytes], length: int | None = None) -> str:
        """Return the checksum of the next ``length`` bytes of an open file [all]; fewer if the file is shorter."""
        checksum, block = cls(), memoryview(bytearray(_BLOCK if length is None else min(_BLOCK, max(length, 1))))
        left = length
        while left is None or left > 0:
            count = file.readinto(block[: len(block) if left is None else min(left, len(block))])  # type: ignore[attr-defined]
            if not count:
                break
            checksum.update(block[:count])
            left = None if left is None else left - count
        return checksum.text()


def of_file(file: Path) -> str:
    """Return the checksum of a file."""
    with open(file, "rb") as stream:
        return Checksum.of(stream)


def read_checksums(directory: Path) -> dict[str, dict[int, tuple[int, str]]] | None:
    """Return the items of checksums.json, {file: {offset: (length, checksum)}}; None without that file.

    Raises GrpoError if its content is not of this form.
    """
    file = directory / CHECKSUMS
    if not file.exists():
        return None
    try:
        found: dict[str, dict[int, tuple[int, str]]] = {}
        for name, items in json.loads(file.read_text()).items():
            offset = 0
            found[name] = {}
            for length, checksum in items:
                found[name][offset] = int(length), str(checksum)
                offset += length
        return found
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise GrpoError(f"{file} cannot be read: {error}") from None
