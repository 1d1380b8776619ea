"""What the files of a ledger say together: groups, batches, and what was unfinished after each batch.

    {ledger}/groups-00000-0003.bin    written by rank 0, its segment 3
    {ledger}/batches-0003.bin         written by rank 0

A segment begins with a record that has the attempt: a run that was killed and started again is the next attempt. An
attempt begins with the first batch that its checkpoint and the ledger do not determine, ``next``. What earlier attempts
wrote about later batches is void, because this attempt generates them anew.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_grpo.rollout.ledger import records
from megatron_grpo.rollout.ledger.records import Record
from megatron_grpo.utils.errors import GrpoError

FOLDER = "ledger"  # in --save
VERSION = 1


class GroupKey(NamedTuple):
    """A group of a run. In a run with --partial-rollouts its number alone is unique."""

    birth: int  # batches that the trainer had taken when it started
    number: int  # in its rollout; with --partial-rollouts in the run


class Place(NamedTuple):
    """A record with groups, and the batch during whose rollout it was written."""

    file: Path
    offset: int
    batch: int


@dataclass(frozen=True)
class BatchRecord:
    """A batch of the trainer: its groups in order, and the state of the run after it was taken."""

    number: int  # from 0
    groups: tuple[GroupKey, ...]
    sampler: dict[str, Any] | None  # state of the prompt sampler; None: unchanged
    metrics: dict[str, float]  # of the rollout, as far as they do not follow from the batch
    reward_failures: int
    num_kept: int  # columns of the kept token ids of --top-k; 0 without them
    # Which groups have started: `PartialRollouts.position`, or that of the conductor; None if all are in the batch.
    started: dict[str, Any] | None

    def head(self) -> dict[str, Any]:
        """Return the record as JSON's types."""
        return vars(self) | {"kind": "batch", "groups": [list(key) for key in self.groups]}

    @classmethod
    def from_head(cls, head: Mapping[str, Any]) -> "BatchRecord":
        """Undo `head`."""
        names = ("number", "sampler", "metrics", "reward_failures", "num_kept", "started")
        return cls(groups=tuple(GroupKey(*key) for key in head["groups"]), **{name: head[name] for name in names})


@dataclass(frozen=True)
class Content:
    """Valid records of a ledger."""

    run: dict[str, Any] | None = None  # what the run is: its flags, and the names of its rewards; None: no ledger
    nexts: tuple[int, ...] = ()  # of each attempt
    groups: dict[GroupKey, Place] = field(default_factory=dict)
    batches: dict[int, BatchRecord] = field(default_factory=dict)
    # By batch and replica: the record with the unfinished groups, and the finished ones that are not taken.
    unfinished: dict[tuple[int, int], tuple[Place, tuple[GroupKey, ...]]] = field(default_factory=dict)

    def next_missing(self, batch: int) -> int:
        """Return the first batch from ``batch`` on that is not recorded."""
        while batch in self.batches:
            batch += 1
        return batch

    def without_later(self, batch: int) -> "Content":
        """Return what remains valid when ``batch`` is generated anew."""
        return replace(
            self,
            groups={key: place for key, place in self.groups.items() if place.batch <= batch},
            batches={number: record for number, record in self.batches.items() if number < batch},
            unfinished={key: value for key, value in self.unfinished.items() if key[0] < batch},
        )


def segments(directory: Path) -> list[Path]:
    """Return the files of a ledger, in the order of their names."""
    return sorted(path for path in directory.glob("*.bin") if re.fullmatch(r"(groups-\d+|batches)-\d+\.bin", path.name))


def read(directory: Path) -> Content:
    """Return the valid records of a ledger; GrpoError names a damaged one. Reads little more than heads."""
    found = [whole for path in segments(directory) if (whole := _segment(path))]
    heads = [segment.head for segment, *_ in found]
    newest = max((head for head in heads if "nexts" in head), key=lambda head: len(head["nexts"]), default=None)
    if newest is None:
        return Content()
    content = Content(newest["run"], tuple(newest["nexts"]))
    for segment, *rest in sorted(found, key=lambda whole: whole[0].head["attempt"]):
        # Later attempts have generated this batch, and those after it, anew.
        limit = min(content.nexts[segment.head["attempt"] + 1 :], default=sys.maxsize)
        for record in rest:
            head = record.head
            place = Place(record.file, record.offset, head.get("batch", 0))
            if head["kind"] == "groups" and head["batch"] <= limit:
                content.groups.update((GroupKey(*key), place) for key in head["groups"])
            elif head["kind"] == "batch" and head["number"] < limit:
                content.batches[head["number"]] = BatchRecord.from_head(head)
            elif head["kind"] == "unfinished" and head["batch"] < limit:
                complete = tuple(GroupKey(*key) for key in head["complete"])
                content.unfinished[head["batch"], head["replica"]] = place, complete
    return content


def _segment(path: Path) -> list[Record]:
    """Return the records of a segment, its own first; none if that is torn."""
    found = list(records.scan(path))
    if found and (found[0].head.get("kind"), found[0].head.get("version")) != ("segment", VERSION):
        raise GrpoError(f"{path} is not of a ledger of version {VERSION}: move its directory away")
    return found
