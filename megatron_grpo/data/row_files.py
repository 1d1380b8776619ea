"""Random access to rows of JSON-lines, Parquet and Arrow files of any size, in bounded memory.

The index of a file divides its rows into blocks of some MiB: a number of lines, or a slice of a Parquet row group. To
return a row, its block is read. The sampler orders rows so that each block is read once in an epoch (sampler.py).

One process indexes the files. The others take its `Index`, and read only the rows that they need: the index of a
JSON-lines file is found by reading all of it.
"""

import contextlib
import hashlib
import json
import os
import socket
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from megatron_grpo.data.blend import check_row_file
from megatron_grpo.data.json_column import kind
from megatron_grpo.data.saved_datasets import PREFIX, cached_files, saved_files
from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import GrpoError, of_file

Int64 = npt.NDArray[np.int64]

BLOCK_BYTES = 8 * 2**20
# Lower bound of the size of a row: Parquet reports almost no bytes for a column with repeated values.
MIN_ROW_BYTES = 1024
_SCAN_BYTES = 2**24
_OPEN_ROW_GROUPS = 8
_SAMPLE_BYTES = 4096  # at the start, in the middle and at the end of a file
_MAX_DEPTH = 200  # levels of JSON in a row: pickle, which sends rows to the reward workers, fails for deeper ones


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks of rows: number of rows, bytes and row group of each, ``[blocks]``.

    The blocks of one row group can only be read in order.
    """

    rows: Int64
    bytes: Int64
    groups: Int64

    def part(self, begin: int, end: int) -> "Blocks":
        """Return the blocks ``begin`` to ``end`` (exclusive)."""
        return Blocks(self.rows[begin:end], self.bytes[begin:end], self.groups[begin:end])


Lines = tuple[Int64, Int64]  # offsets of non-blank lines; for each blank line the number of non-blank ones before it


@dataclass(frozen=True)
class Index:
    """What one process has found in a file: its host, sizes and samples of the bytes.

    Of JSON-lines also the lines, and the CRC-32 of all bytes.
    """

    host: str
    bytes: int
    samples: str
    lines: Lines | None
    checksum: int | None


class JsonLines:
    """The lines of a JSON-lines file, except blank ones; the index takes 8 bytes for each line.

    ``index``: that of another process [read the whole file]. Rows are those of the file as it was then: it may grow,
    and GrpoError ends a read after another change, because ranks would train on different rows.
    """

    merges_shapes = False

    def __init__(self, path: Path, index: Index | None = None):
        self.path, self.parts = path, [path]
        try:
            self.stream = path.open("rb")
            self._seen = self._state()
            self.lines: Lines | None
            self.checksum: int | None
            if index is None or index.lines is None:
                self.lines, self.checksum, self.size = self._scan()
            else:
                self.lines, self.checksum, self.size = index.lines, index.checksum, index.bytes
            self._starts, self._blanks = self.lines
        except OSError as error:
            raise GrpoError(f"{path}: cannot be read: {error.strerror}") from error
        size = np.maximum(np.diff(self._starts, append=self.size), MIN_ROW_BYTES)
        self._firsts = np.flatnonzero(np.diff((np.cumsum(size) - size) // BLOCK_BYTES, prepend=-1))
        rows = np.diff(self._firsts, append=len(self._starts))
        sums = np.add.reduceat(size, self._firsts) if len(rows) else rows
        self.blocks = Blocks(rows, sums, np.arange(len(rows)))

    def _state(self) -> tuple[int, int]:
        """Return what a change of the file changes: its size and time."""
        found = os.fstat(self.stream.fileno())
        return found.st_size, found.st_mtime_ns

    def _scan(self) -> tuple[Lines, int, int]:
        """Return the lines of the file, the CRC-32 of its bytes, and their number."""
        checksum = 0
        starts, blanks = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        offset, count, at_start = 0, 0, True
        while chunk := self.stream.read(_SCAN_BYTES):
            data, checksum = np.frombuffer(chunk, np.uint8), zlib.crc32(chunk, checksum)
            begins = np.flatnonzero(data[:-1] == ord("\n")) + 1
            if at_start:
                begins = np.concatenate([[0], begins])
            at_start = bool(data[-1] == ord("\n"))
            blank = np.zeros(len(begins), bool)
            for i in np.flatnonzero(data[begins] <= ord(" ")):  # the line begins with white space or is empty
                blank[i] = self._is_blank(offset + int(begins[i]))
            starts.append(begins[~blank] + offset)
            blanks.append(count + np.cumsum(~blank)[blank])
            count, offset = count + int((~blank).sum()), offset + len(chunk)
            progress.advance()
        return (np.concatenate(starts), np.concatenate(blanks)), checksum, offset

    def check_unchanged(self) -> None:
        """Raise GrpoError if the indexed bytes are others now; after a change of size or time, all are read."""
        if (state := self._state()) == self._seen:
            return
        checksum = 0
        for start in range(0, self.size, _SCAN_BYTES):
            checksum = zlib.crc32(os.pread(self.stream.fileno(), min(_SCAN_BYTES, self.size - start), start), checksum)
            progress.advance()
        if checksum != self.checksum:
            raise GrpoError(
                f"{self.path} was changed on host {socket.gethostname()} after the start of the run, whose ranks would "
                "train on different rows: put the new rows into another file, and start again"
            )
        self._seen = state

    def _is_blank(self, start: int) -> bool:
        while text := os.pread(self.stream.fileno(), 4096, start):
            line, end, _ = text.partition(b"\n")
            if end or line.strip():
                return not line.strip()
            start += len(text)
        return True

    def read(self, block: int) -> list[bytes]:
        """Return the lines of a block; see `check_unchanged`."""
        self.check_unchanged()
        first = self._firsts[block]
        bounds = self._starts[first : first + self.blocks.rows[block] + 1].tolist()
        if len(bounds) == self.blocks.rows[block]:
            bounds.append(self.size)
        data = os.pread(self.stream.fileno(), bounds[-1] - bounds[0], bounds[0])
        # A row ends with its line: blank lines, which may hold other characters than spaces, follow it in the data.
        return [data[a - bounds[0] : b - bounds[0]].partition(b"\n")[0] for a, b in pairwise(bounds)]

    def where(self, number: int) -> str:
        """Return the place of a row for messages: file and line or row."""
        return f"{self.path}:{number + 1 + np.searchsorted(self._blanks, number, 'right')}"

    @staticmethod
    def row(lines: list[bytes], index: int) -> dict[str, Any]:
        """Return a row of a block; raise GrpoError if the line is not a JSON object."""
        return parse_line(lines[index])


class ParquetRows:
    """The rows of a Parquet file, read one slice of a row group at a time; GrpoError for an unreadable file."""

    merges_shapes = (
        True  # an object has the keys of all objects of its column, with null for those that are not its own
    )
    lines = checksum = None

    def __init__(self, path: Path):
        self.path, self.parts = path, [path]
        try:
            # read_table would interpret directories such as "split=train" as columns. The buffer avoids loading a whole
            # row group, which can be of any size.
            self._file = pyarrow.parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
            metadata = self._file.metadata
            names = self._file.schema_arrow.names
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise GrpoError(f"{path}: not a readable Parquet file: {error}") from error
        if len(set(names)) < len(names):
            raise GrpoError(f"{path}: two columns have the same name: {', '.join(names)}")
        rows, sizes, groups = [], [], []
        self._steps: list[int] = []  # rows of a block, for each row group
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            size = max(group.total_byte_size / max(group.num_rows, 1), MIN_ROW_BYTES)
            step = max(int(BLOCK_BYTES / size), 1)
            self._steps.append(step)
            for begin in range(0, group.num_rows, step):
                rows.append(min(step, group.num_rows - begin))
                sizes.append(int(rows[-1] * size))
                groups.append(number)
        self.blocks = Blocks(*(np.array(column, np.int64) for column in (rows, sizes, groups)))
        self._open: OrderedDict[int, tuple[Iterator[pyarrow.Table], int]] = (
            OrderedDict()
        )  # row group -> (its reader, next block)

    def read(self, block: int) -> pyarrow.Table:
        """Return the rows of a block.

        The earlier blocks of its row group are read again unless the previous block was read before this one.
        """
        group = int(self.blocks.groups[block])
        first = int(np.searchsorted(self.blocks.groups, group))
        tables, at = self._open.pop(group, (iter(()), block + 1))
        if at > block:
            tables, at = self._tables(group), first
        try:
            for _ in range(at, block + 1):
                table = next(tables)
        except (pyarrow.ArrowException, OSError, ValueError, StopIteration) as error:
            raise GrpoError(f"{self.path}: row group {group} is damaged: {error or 'rows are missing'}") from error
        if block + 1 < len(self.blocks.groups) and self.blocks.groups[block + 1] == group:
            self._open[group] = tables, block + 1
        if len(self._open) > _OPEN_ROW_GROUPS:
            self._open.popitem(last=False)
        return table

    def _tables(self, group: int) -> Iterator[pyarrow.Table]:
        """Yield the blocks of a row group; batches of Arrow may be shorter than a block and are joined."""
        step, held = self._steps[group], []
        for batch in self._file.iter_batches(step, row_groups=[group], use_threads=False):
            held.append(batch)
            while sum(part.num_rows for part in held) >= step:
                table = pyarrow.Table.from_batches(held)
                yield table.slice(0, step)
                held = table.slice(step).to_batches()
        if held:
            yield pyarrow.Table.from_batches(held)

    def where(self, number: int) -> str:
        """Return the place of a row for messages: file and line or row."""
        return f"{self.path}, row {number + 1}"

    @staticmethod
    def row(table: pyarrow.Table, index: int) -> dict[str, Any]:
        """Return a row of a block; raise GrpoError for values that Python cannot represent."""
        return table_row(table, index)


class ArrowRows:
    """The rows of the Arrow files of one data set of the library datasets, mapped into memory and not read at once."""

    merges_shapes = True
    lines = checksum = None

    def __init__(self, path: Path, files: Sequence[Path]):
        """``path`` is the name of the data set in messages; GrpoError for an unreadable file."""
        self.path, self.parts = path, files
        tables = [_map_arrow(file) for file in files]
        if any(table.schema.names != tables[0].schema.names for table in tables):
            raise GrpoError(f"{path}: its Arrow files have different columns: give the files apart")
        self._table = pyarrow.concat_tables(tables, promote_options="permissive")
        count = self._table.num_rows
        size = max(self._table.nbytes / max(count, 1), MIN_ROW_BYTES)
        self._step = max(int(BLOCK_BYTES / size), 1)
        rows = np.diff(np.append(np.arange(0, count, self._step), count)).astype(np.int64)
        self.blocks = Blocks(rows, (rows * size).astype(np.int64), np.arange(len(rows)))

    def read(self, block: int) -> pyarrow.Table:
        """Return the rows of a block."""
        return self._table.slice(block * self._step, self._step)

    def where(self, number: int) -> str:
        """Return the place of a row for messages: data set and row."""
        return f"{self.path}, row {number + 1}"

    @staticmethod
    def row(table: pyarrow.Table, index: int) -> dict[str, Any]:
        """Return a row of a block; raise GrpoError for values that Python cannot represent."""
        return table_row(table, index)


def _map_arrow(path: Path) -> pyarrow.Table:
    """Map an Arrow file, of the stream format as datasets writes it."""
    try:
        return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise GrpoError(f"{path}: not a readable Arrow file of the library datasets: {error}") from error


def table_row(table: pyarrow.Table, index: int) -> dict[str, Any]:
    """Return a row of a table; raise GrpoError for values that Python cannot represent.

    Such values are text that is not UTF-8 and dates outside Python's range.
    """
    try:
        return table.slice(index, 1).to_pylist()[0]
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise GrpoError(f"a value cannot be read: {error}") from error


AnyRows = JsonLines | ParquetRows | ArrowRows


class RowFiles:
    """The rows of the concatenated files, by number, with a cache of recently read blocks of ``held_bytes``.

    ``indices``: those of another process, for each file [index the files].
    """

    def __init__(self, paths: Sequence[str | Path], held_bytes: int, indices: Sequence[Index] | None = None):
        self.held_bytes = held_bytes  # limit of the cache, in addition to the largest block
        if indices is None:
            self.files = [open_rows(Path(path)) for path in paths]
            indices = [index_of(file) for file in self.files]
        else:
            self.files = [_open_indexed(Path(path), index) for path, index in zip(paths, indices, strict=True)]
        self.indices = indices  # of the files as they were opened
        blocks = [file.blocks for file in self.files]
        groups = np.cumsum([0] + [int(b.groups[-1]) + 1 if len(b.groups) else 0 for b in blocks])
        self.blocks = Blocks(
            np.concatenate([b.rows for b in blocks]),
            np.concatenate([b.bytes for b in blocks]),
            np.concatenate([b.groups + begin for b, begin in zip(blocks, groups[:-1], strict=True)]),
        )
        self.block_bounds = np.cumsum([0] + [len(b.rows) for b in blocks])  # bounds of the blocks of each file
        self.row_bounds = np.cumsum([0] + [int(b.rows.sum()) for b in blocks])  # bounds of the rows of each file
        self._first_rows = np.cumsum(self.blocks.rows) - self.blocks.rows
        self._cached_blocks: OrderedDict[int, Any] = OrderedDict()
        self._bytes = 0
        self._largest = int(self.blocks.bytes.max(initial=0))

    def __len__(self) -> int:
        return int(self.row_bounds[-1])

    def find(self, number: int) -> tuple[AnyRows, Any, int, str]:
        """Return (file, block, index in the block, place) of a row; ``file.row(block, index)`` is the row.

        Raises GrpoError for a damaged file.
        """
        block = int(np.searchsorted(self._first_rows, number, "right")) - 1
        number_of_file = int(np.searchsorted(self.block_bounds, block, "right")) - 1
        file = self.files[number_of_file]
        if block not in self._cached_blocks:
            self._cached_blocks[block] = file.read(block - int(self.block_bounds[number_of_file]))
            self._bytes += int(self.blocks.bytes[block])
            while self._bytes > self.held_bytes + self._largest:
                self._bytes -= int(self.blocks.bytes[self._cached_blocks.popitem(last=False)[0]])
        self._cached_blocks.move_to_end(block)
        where = file.where(number - int(self.row_bounds[number_of_file]))
        return file, self._cached_blocks[block], number - int(self._first_rows[block]), where


def index_of(file: AnyRows) -> Index:
    """Return the index of a file for other processes; GrpoError if it cannot be read, or was changed meanwhile."""
    size, digest = 0, hashlib.blake2b(digest_size=16)
    try:
        for part in file.parts:
            with contextlib.ExitStack() as stack:
                stream = file.stream if isinstance(file, JsonLines) else stack.enter_context(open(part, "rb"))
                length = os.fstat(stream.fileno()).st_size
                if isinstance(file, JsonLines):
                    length = min(length, file.size)  # what has been appended since does not count
                digest.update(str(length).encode())
                for start in (0, length // 2, max(0, length - _SAMPLE_BYTES)):
                    digest.update(os.pread(stream.fileno(), min(_SAMPLE_BYTES, length - start), start))
            size += length
    except OSError as error:
        raise GrpoError(f"{part}: cannot be read: {error.strerror}") from error
    if isinstance(file, JsonLines):
        file.check_unchanged()
    return Index(socket.gethostname(), size, digest.hexdigest(), file.lines, file.checksum)


def _open_indexed(path: Path, index: Index) -> AnyRows:
    """Open a file with the index of another process; GrpoError if it is not the same file on this host.

    Equal sizes and samples are enough: what differs between them is found when a row is read, or not at all.
    """
    cure = f"give the file of host {index.host} to all hosts, or put it where all see it, such as on NFS or Lustre"
    try:
        file = open_rows(path, index)
        own = index_of(file)
    except (GrpoError, PermissionError) as error:
        reason = of_file(error) if isinstance(error, PermissionError) else error
        raise GrpoError(f"host {socket.gethostname()}: {reason}; {cure}") from error
    if own.bytes != index.bytes:
        differ = f"has {own.bytes:,} bytes on host {own.host} and {index.bytes:,} for rank 0 on host {index.host}"
    elif own.samples != index.samples:
        differ = f"has another content on host {own.host} than for rank 0 on host {index.host}"
    else:
        return file
    if own.host == index.host:
        cure = (
            "if ranks start in different directories, give an absolute path; else it was changed since rank 0 has read "
            "it: start again once nothing writes to it"
        )
    raise GrpoError(f"{path} {differ}: {cure}")


def open_rows(path: Path, index: Index | None = None) -> AnyRows:
    """Open a .jsonl, .json (one object per line), .parquet or .arrow file, a directory of the library datasets, or a
    data set in its cache (hf:NAME); raise GrpoError for any other path.

    ``index`` of a JSON-lines file: see `JsonLines`.
    """
    if str(path).startswith(PREFIX):
        return ArrowRows(path, cached_files(str(path)))
    if path.is_dir():
        return ArrowRows(path, saved_files(path))
    check_row_file(path)
    if not path.is_file():
        there = "not a file of a disk, in which rows are read in any order" if path.exists() else "no such file"
        link = f" (a link to {os.readlink(path)})" if path.is_symlink() else ""
        raise GrpoError(f"{path}{link}: {there}")
    if path.suffix == ".arrow":
        return ArrowRows(path, [path])
    return ParquetRows(path) if path.suffix == ".parquet" else JsonLines(path, index)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) for every row of a file, in order; raise GrpoError with the place of an invalid row."""
    rows = RowFiles([path], BLOCK_BYTES)
    for number in range(len(rows)):
        file, block, index, where = rows.find(number)
        try:
            row = file.row(block, index)
        except GrpoError as error:
            raise GrpoError(f"{where}: {error}") from error
        yield where, row


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse the JSON object in a line.

    Raises GrpoError for any other value, a duplicate key, or text that is not Unicode.
    """
    try:
        text = line.decode("utf-8-sig")
        row = json.loads(text, object_pairs_hook=_to_object)
        if "\\ud" in text or "\\uD" in text:  # a lone surrogate cannot be encoded, and fails here
            json.dumps(row, ensure_ascii=False).encode()
        if text.count("[") + text.count("{") > _MAX_DEPTH:
            _check_depth(row)
    except (ValueError, RecursionError) as error:
        raise GrpoError(f"not valid JSON ({error}); expected one object per line") from error
    if not isinstance(row, dict):
        raise GrpoError(f"expected a JSON object, found {kind(row)}")
    return row


def _check_depth(row: Any) -> None:
    level, depth = [row], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
        inside = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inside for value in values if isinstance(value, dict | list)]


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'the key "{twice}" occurs twice')
    return found
