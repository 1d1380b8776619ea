"""The ledger that a run writes: finished groups before they count, batches before their first update.

A rank that leads an engine replica appends the groups that its replica has finished and scored; a thread writes and
flushes them, while the engine generates. Rank 0 appends the batches. All ranks read the directory.
"""

import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.rollout.ledger import records
from megatron_grpo.rollout.ledger.content import VERSION, BatchRecord, Content, GroupKey, Place, segments
from megatron_grpo.rollout.unfinished import Group, PromptOf, from_arrays, to_arrays
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.log import log


class Segments:
    """Files of one writer, ``{name}-0000.bin``, ``{name}-0001.bin``, ...; each begins with ``head``."""

    def __init__(self, directory: Path, name: str, head: Mapping[str, Any]):
        self._directory, self._name, self._head = directory, name, dict(head)
        self._file: records.RecordFile | None = None

    def append(self, head: Mapping[str, Any], arrays: records.Arrays | None = None) -> None:
        """Write a record and flush it to the disk; raises OSError."""
        self.open()
        assert self._file is not None
        try:
            self._file.append(head, arrays)
        except OSError:
            self.close()  # the next record begins a new file: this one may end with a torn record
            raise

    def open(self) -> None:
        """Begin a file if none is open; raises OSError."""
        if self._file is not None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        numbers = [int(path.stem.rpartition("-")[2]) for path in self._directory.glob(f"{self._name}-*.bin")]
        path = self._directory / f"{self._name}-{max(numbers, default=-1) + 1:04d}.bin"
        file = records.RecordFile(path)
        try:
            file.append({"kind": "segment", "version": VERSION} | self._head)
        except OSError:
            file.close()
            path.unlink()
            raise
        self._file = file

    def close(self) -> None:
        """End the file; the next record begins a new one."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Ledger:
    """The ledger of this run, on one rank; an object for each attempt (content.py).

    ``content`` is what earlier attempts have written, ``next`` the first batch that this one generates. ``run`` is what
    the run is. ``producer``: number of this rank among those that append groups, or None. ``leads``: appends batches.
    """

    def __init__(
        self,
        directory: Path,
        content: Content,
        next: int,
        run: dict[str, Any],
        producer: int | None,
        leads: bool,
        stop: bool = False,
    ):
        self.directory, self.content, self.stop = directory, content.without_later(next), stop
        self.attempt = len(content.nexts)
        head = {"attempt": self.attempt}
        self._groups = Segments(directory, f"groups-{producer:05d}", head) if producer is not None else None
        self._batches = None
        if leads:
            self._batches = Segments(directory, "batches", head | {"run": run, "nexts": [*content.nexts, next]})
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._writes: list[tuple[Future[None], list[GroupKey]]] = []
        self._lost: set[GroupKey] = set()  # groups that could not be written
        self._reported = False

    def begin(self) -> None:
        """Begin this attempt on the disk, before it generates anything; raises OSError on rank 0."""
        if self._batches is not None:
            self._batches.open()

    # ---- groups

    @property
    def appends(self) -> bool:
        """Whether this rank appends groups."""
        return self._groups is not None

    def append(self, batch: int, groups: Mapping[int, Group]) -> Future[None]:
        """Append finished groups with their rewards in the rollout for ``batch``; returns at once: `flush`.

        The returned object is done when they are on the disk, or could not be written.
        """
        keys = [GroupKey(group.birth, number) for number, group in groups.items()]
        return self._submit({"kind": "groups", "batch": batch, "groups": keys}, groups, keys)

    def append_unfinished(self, batch: int, replica: int, groups: Mapping[int, Group]) -> None:
        """Append what a replica has after ``batch`` was taken: the finished groups are in the ledger already."""
        left = {number: group for number, group in groups.items() if not group.complete}
        complete = [GroupKey(group.birth, number) for number, group in groups.items() if group.complete]
        self._submit({"kind": "unfinished", "batch": batch, "replica": replica, "complete": complete}, left, complete)

    def _submit(self, head: dict[str, Any], groups: Mapping[int, Group], keys: list[GroupKey]) -> Future[None]:
        assert self._groups is not None
        writer, groups = self._groups, dict(groups)
        write = self._thread.submit(lambda: writer.append(head, to_arrays(groups)))
        self._writes.append((write, keys))
        return write

    def flush(self) -> None:
        """Wait until everything that was appended is on the disk."""
        writes, self._writes = self._writes, []
        for write, keys in writes:
            try:
                write.result()
            except OSError as error:
                self._lost.update(keys)
                self._report(error)

    def has_lost(self, keys: Collection[GroupKey]) -> bool:
        """Return whether one of these groups could not be written."""
        return not self._lost.isdisjoint(keys)

    def known(self, groups: Mapping[int, Group]) -> dict[int, Group]:
        """Return those of ``groups``, by number, that an earlier attempt has finished and scored.

        A group of which every episode failed is left out: its environment may work by now.
        """
        numbers = [n for n, group in groups.items() if GroupKey(group.birth, n) in self.content.groups]
        keys = [GroupKey(groups[number].birth, number) for number in numbers]
        found = load(self.content, keys, recorded_prompt)
        known = {}
        for number, key in zip(numbers, keys, strict=True):
            prompt, completions = groups[number].prompt, found[key].completions
            failed = all(completion is not None and completion.finish_reason == "failed" for completion in completions)
            same = found[key].prompt.ids == prompt.ids and len(completions) == len(groups[number].completions)
            if same and not failed:
                known[number] = replace(found[key], prompt=prompt)
        return known

    # ---- batches

    def record(self, batch: BatchRecord) -> None:
        """Write a batch on rank 0, and flush it."""
        if self._batches is None:
            return
        try:
            self._batches.append(batch.head())
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        message = f"the ledger {self.directory} cannot be written: {error.strerror}"
        if self.stop:
            raise GrpoError(f"{message} (--on-save-error stop)") from error
        if not self._reported:
            self._reported = True
            log(f"{message}; a resume generates these rollouts again")

    # ---- segments

    def roll(self) -> None:
        """End the files of this rank, after a checkpoint: the next record begins new ones, and old ones can go."""
        self.flush()
        for writer in (self._groups, self._batches):
            if writer is not None:
                writer.close()

    def close(self) -> None:
        """Flush and close."""
        self.roll()
        self._thread.shutdown()


def load(content: Content, keys: Collection[GroupKey], prompt_of: PromptOf) -> dict[GroupKey, Group]:
    """Return groups of a ledger; GrpoError if a record is missing or damaged."""
    by_place: dict[Place, list[GroupKey]] = {}
    for key in keys:
        if key not in content.groups:
            raise GrpoError(f"the ledger has no record of group {key.number} of rollout {key.birth}: a file is missing")
        by_place.setdefault(content.groups[key], []).append(key)
    found: dict[GroupKey, Group] = {}
    for place, wanted in by_place.items():
        groups = from_arrays(records.read_arrays(place.file, place.offset), prompt_of)
        found |= {key: groups[key.number] for key in wanted}
    return found


def recorded_prompt(row: int, ids: list[int]) -> Prompt:
    """Return the prompt of a recorded group without its row, for which the data would be read."""
    return Prompt(row, ids, {}, f"row {row} of the recorded run")


def set_aside(directory: Path) -> Path:
    """Move the files of a ledger into a new folder of its directory, and return that."""
    number = 1
    while (folder := directory / f"aside-{number}").exists():
        number += 1
    folder.mkdir()
    for path in directory.glob("*.bin"):
        os.replace(path, folder / path.name)
    return folder


def delete_before(directory: Path, batch: int, max_staleness: int) -> None:
    """Delete the segments without a record that a resume at ``batch`` or later can need.

    A group is needed until batch ``birth + max_staleness``, the last one that can have it. The newest segment of each
    writer stays: it may be open.
    """

    def needed(head: Mapping[str, Any]) -> bool:
        match head["kind"]:
            case "groups":
                return any(GroupKey(*key).birth + max_staleness >= batch for key in head["groups"])
            case "unfinished":
                return head["batch"] >= batch
            case "batch":
                return head["number"] >= batch
        return False  # the head of the segment

    by_writer: dict[str, list[Path]] = {}
    for path in segments(directory):
        by_writer.setdefault(path.stem.rpartition("-")[0], []).append(path)
    for paths in by_writer.values():
        for path in paths[:-1]:
            if not any(needed(record.head) for record in records.scan(path)):
                path.unlink()
