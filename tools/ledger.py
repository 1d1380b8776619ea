#!/usr/bin/env python3
"""Show what a ledger holds (--ledger, or a --save directory with one); needs no GPU and reads while a run writes.

    python tools/ledger.py RUN                     the run, and a line for each batch
    python tools/ledger.py RUN --batch 3           the groups of batch 3
    python tools/ledger.py RUN --group 2 17        the tokens of group 17 of rollout 2
    python tools/ledger.py RUN --check             read every record; exit code 1 for damage or a missing group

A group is named by the number of batches that the trainer had taken when it started, and by its number.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from megatron_grpo.data.batch import FinishReason
from megatron_grpo.rollout.ledger import content, records
from megatron_grpo.rollout.ledger.content import FOLDER, Content, GroupKey
from megatron_grpo.utils.errors import GrpoError


class GroupView:
    """The arrays of one group of a record: prompt_ids, and by completion tokens, versions, finish reasons, rewards."""

    def __init__(self, found: Content, key: GroupKey):
        if key not in found.groups:
            raise GrpoError(f"group {key.number} of rollout {key.birth} is not in the ledger")
        place = found.groups[key]
        arrays = records.read_arrays(place.file, place.offset)
        keys = list(zip(arrays["births"].tolist(), arrays["numbers"].tolist(), strict=True))
        g, size = keys.index((key.birth, key.number)), len(arrays["lengths"]) // len(keys)
        mine = slice(g * size, (g + 1) * size)
        ends, prompt_ends = np.cumsum(arrays["lengths"]), np.cumsum(arrays["prompt_lengths"])
        begins = ends - arrays["lengths"]
        tokens = [slice(begin, end) for begin, end in zip(begins[mine], ends[mine], strict=True)]
        self.row = int(arrays["rows"][g])
        self.prompt_ids = arrays["prompt_ids"][prompt_ends[g] - arrays["prompt_lengths"][g] : prompt_ends[g]].tolist()
        self.rewards = arrays["rewards"][int(arrays["scored"][:g].sum())]
        self.reasons = [FinishReason(reason).name.lower() for reason in arrays["finish_reasons"][mine]]
        self.tokens = [arrays["token_ids"][part].tolist() for part in tokens]
        self.versions = [arrays["weight_versions"][part] for part in tokens]


def overview(found: Content) -> list[str]:
    """Return lines about the run and each batch."""
    lines = [f"{len(found.nexts)} attempts, which began with batches {', '.join(map(str, found.nexts))}"]
    lines.append(f"{len(found.batches)} batches, {len(found.groups)} finished groups")
    for number, record in sorted(found.batches.items()):
        births = Counter(number - key.birth for key in record.groups)
        ages = ", ".join(f"{count} started {age} batches before" for age, count in sorted(births.items()))
        lines.append(f"batch {number}: {len(record.groups)} groups; {ages}")
    return lines


def batch_lines(found: Content, number: int) -> list[str]:
    """Return a line for each group of a batch."""
    if number not in found.batches:
        raise GrpoError(f"batch {number} is not in the ledger, which has {sorted(found.batches)}")
    lines = []
    for place, key in enumerate(found.batches[number].groups):
        group = GroupView(found, key)
        rewards = " ".join("/".join(f"{value:.3g}" for value in row) for row in group.rewards)
        lengths = " ".join(
            f"{len(ids)}{'' if why == 'stop' else f' ({why})'}" for ids, why in zip(group.tokens, group.reasons)
        )
        lines.append(f"{place}: group {key.birth} {key.number}, row {group.row}; rewards {rewards}; tokens {lengths}")
    return lines


def group_lines(found: Content, key: GroupKey, tokenizer: str | None) -> list[str]:
    """Return the prompt and the completions of a group, as text with ``tokenizer``, a directory."""
    decode = str
    if tokenizer:
        from transformers import AutoTokenizer

        decode = AutoTokenizer.from_pretrained(tokenizer).decode
    group = GroupView(found, key)
    lines = [f"row {group.row}, prompt: {decode(group.prompt_ids)}"]
    for place, ids in enumerate(group.tokens):
        versions = sorted(set(group.versions[place].tolist()))
        lines.append(f"{place}: {group.reasons[place]}, rewards {group.rewards[place].tolist()}, versions {versions}")
        lines.append(f"   {decode(ids)}")
    return lines


def problems(found: Content) -> list[str]:
    """Return what is wrong; reads all records."""
    wrong = []
    times = Counter(key for record in found.batches.values() for key in record.groups)
    for key, count in times.items():
        if count > 1:
            wrong.append(f"group {key.birth} {key.number} is in {count} batches")
        if key not in found.groups:
            wrong.append(f"group {key.birth} {key.number} is in a batch and was not written")
    places = {*found.groups.values(), *(place for place, _ in found.unfinished.values())}
    for place in sorted(places):
        try:
            records.read_arrays(place.file, place.offset)
        except GrpoError as error:
            wrong.append(str(error))
    return wrong


def main() -> int:
    """Parse the command line, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="RUN", help="directory of --ledger, or of --save")
    parser.add_argument("--batch", type=int, metavar="N", help="show the groups of this batch")
    parser.add_argument("--group", type=int, nargs=2, metavar=("BIRTH", "NUMBER"), help="show the tokens of this group")
    parser.add_argument("--tokenizer", metavar="DIR", help="show text in place of token ids")
    parser.add_argument("--check", action="store_true", help="read every record")
    args = parser.parse_args()
    try:
        folder = args.directory / FOLDER
        found = content.read(folder if folder.is_dir() else args.directory)
        if found.run is None:
            raise GrpoError(f"no ledger in {args.directory}")
        if args.batch is not None:
            lines = batch_lines(found, args.batch)
        elif args.group is not None:
            lines = group_lines(found, GroupKey(*args.group), args.tokenizer)
        else:
            lines = overview(found)
        wrong = problems(found) if args.check else []
    except GrpoError as error:
        print(f"ledger.py: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines + wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
