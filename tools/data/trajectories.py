"""Write completions of any system, with their rewards, into a ledger for --train-only.

    python tools/data/trajectories.py --input a.jsonl b.parquet --output LEDGER \\
        --load-hf MODEL --num-generations 8 --reward-funcs accuracy
    torchrun ... pretrain_grpo.py --train-only LEDGER --load-hf MODEL --num-generations 8 --reward-funcs accuracy ...

The other flags are those of the run that will learn: tokenizer, chat template, lengths. A row is a completion:

    prompt or messages    as in a row of prompts; of messages every turn of the assistant is learnt
    completion            text, behind a prompt
    reward or rewards     a number, or one for each of --reward-funcs, whose names these rewards get; null: not scored
    group                 optional, a text or number: rows of one group are compared; without it those of one prompt
    truncated             optional, true: the completion does not end with the end of a turn

or, as tokens: prompt_ids, completion_ids (with the token that ends a turn, unless truncated), and perhaps log_probs,
the log-probability of each token of the completion under the policy that sampled it, at --temperature.
docs/ledger.md says what a run learns with and without them.

--num-generations rows are a group of the run: a larger group of rows is divided, what is left over is left out, and so
are rows that are too long with --truncation-strategy delete. A bad row ends the program.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.data.answer_column import find_answers
from megatron_grpo.data.arguments import resolve_chat_template, resolve_system_prompt
from megatron_grpo.data.demonstrations import Demonstration, Demonstrations, prompt_key
from megatron_grpo.data.end_of_turn import turn_end_token_ids
from megatron_grpo.data.json_column import json_column
from megatron_grpo.data.prompts import LeftOut
from megatron_grpo.data.tokenizer import build_tokenizer
from megatron_grpo.environments.registry import tools_of
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.rollout.ledger.content import BatchRecord, Content, GroupKey, segments
from megatron_grpo.rollout.ledger.ledger import Ledger
from megatron_grpo.rollout.unfinished import Group
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.early_checks import check_reward_names
from megatron_grpo.training.recorded_run import OF_DATA
from megatron_grpo.training.resolve import resolve_origin
from megatron_grpo.utils.arguments import resolved
from megatron_grpo.utils.errors import GrpoError

BATCH = 64  # groups of a record
FIRST_ROW = 1 << 40  # of trajectories: no row of --train-data-path


class Trajectories(Demonstrations):
    """The completions of the files, by number, as `Demonstrations`; a row with token ids is taken as it is."""

    flag, what = "--input", "trajectories"

    def _demonstration(self, number: int, row: dict[str, Any], where: str, directory: Path) -> Demonstration:
        if row.get("completion_ids") is not None:
            ids, completion = (
                _token_ids(row, name, self._args.vocab_size) for name in ("prompt_ids", "completion_ids")
            )
            return Demonstration(number, ids, row, where, {}, None, completion, [1] * len(completion))
        if row.get("log_probs") is not None:
            raise GrpoError('"log_probs" are of tokens: give "prompt_ids" and "completion_ids", too')
        text = row
        if row.get("completion") is not None:
            text = {name: value for name, value in row.items() if name not in find_answers(row)}
            text["answer"] = row["completion"]
        found = super()._demonstration(number, text, where, directory)
        if not row.get("truncated"):
            return replace(found, row=row)
        if len(found.completion) < 2:
            raise GrpoError("a truncated completion has no token")
        return replace(found, row=row, completion=found.completion[:-1], mask=found.mask[:-1])


def _token_ids(row: Mapping[str, Any], name: str, vocab_size: int) -> list[int]:
    ids = json_column(row.get(name))
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise GrpoError(f'"{name}" must be a list of token ids from 0 to {vocab_size - 1}, found {ids!r:.100}')
    return ids


def _log_probs(row: Mapping[str, Any], count: int) -> list[float] | None:
    values = json_column(row.get("log_probs"))
    if values is None:
        return None
    numbers = isinstance(values, list) and all(isinstance(x, int | float) and -math.inf < x <= 1e-3 for x in values)
    if not numbers or len(values) != count:
        raise GrpoError(f'"log_probs" must have a number up to 0 for each of {count} tokens, found {values!r:.100}')
    return [float(x) for x in values]


def _rewards(row: Mapping[str, Any], names: Sequence[str]) -> list[float]:
    """Return the rewards of a row, NaN for null."""
    found = json_column(row.get("rewards"))
    if found is None:
        if "reward" not in row:
            raise GrpoError('there is no "reward" and no "rewards"')
        found = [row["reward"]]
    values = [math.nan if x is None else x for x in found] if isinstance(found, list) else []
    if len(values) != len(names) or not all(type(x) in (int, float, bool) and abs(x) != math.inf for x in values):
        raise GrpoError(
            f"the rewards must be {len(names)} numbers (--reward-funcs {' '.join(names)}), found {found!r:.100}"
        )
    return [float(x) for x in values]


def _completion(found: Demonstration) -> Completion:
    reason = "length" if found.row.get("truncated") else "stop"
    mask = None if all(found.mask) else found.mask
    log_probs = _log_probs(found.row, len(found.completion))
    versions = [0] * len(found.completion)
    return Completion(0, found.completion, log_probs, reason, versions, response_mask=mask, turns=found.turns)


def read_groups(data: Trajectories, args: argparse.Namespace) -> tuple[list[Group], int, int]:
    """Return groups of --num-generations rows in the order of the first ones, the rows left over, and too long ones."""
    rows: dict[Any, list[tuple[Demonstration, Completion, list[float]]]] = {}
    too_long = 0
    for number in range(len(data)):
        try:
            found = data.read(number)
        except LeftOut as left:
            if left.reason == "bad":
                raise GrpoError(str(left)) from left
            too_long += 1
            continue
        try:
            if found.images is not None and found.images.sources:
                raise GrpoError("trajectories with images are not read")
            one = found, _completion(found), _rewards(found.row, args.reward_funcs)
        except GrpoError as error:
            raise GrpoError(f"{found.source}: {error}") from error
        group = found.row.get("group")
        rows.setdefault(prompt_key(found.ids) if group is None else str(group), []).append(one)
    groups: list[Group] = []
    left_over = 0
    for members in rows.values():
        if len({prompt_key(found.ids) for found, *_ in members}) > 1:
            raise GrpoError(f"{members[0][0].source}: the rows of its group have different prompts")
        whole = len(members) // args.num_generations * args.num_generations
        left_over += len(members) - whole
        for first in range(0, whole, args.num_generations):
            part = members[first : first + args.num_generations]
            prompts, completions, rewards = zip(*part, strict=True)
            values = np.array(rewards, np.float32)
            groups.append(
                Group(replace(prompts[0], id=FIRST_ROW + prompts[0].id), len(groups) // BATCH, completions, values)
            )
    return groups, left_over, too_long


def write(directory: Path, groups: Sequence[Group], run: dict[str, Any]) -> None:
    """Write a new ledger of the groups."""
    ledger = Ledger(directory, Content(), 0, run, producer=0, leads=True, stop=True)
    ledger.begin()
    for number, first in enumerate(range(0, len(groups), BATCH)):
        part = dict(enumerate(groups[first : first + BATCH]))
        ledger.append(number, part)
        ledger.flush()
        ledger.record(BatchRecord(number, tuple(GroupKey(number, n) for n in part), None, {}, 0, 0, None))
    ledger.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--input", nargs="+", required=True, help="files with a completion a row: JSON lines or Parquet"
    )
    parser.add_argument("--output", type=Path, required=True, help="directory of the new ledger")
    own, flags = parser.parse_known_args(argv)
    try:
        args = resolved(parse_args(flags), resolve_system_prompt, resolve_chat_template)
        args = resolve_origin(args, resume=False)
        if not (args.tokenizer_model and args.vocab_size):
            raise GrpoError("give --load-hf, or --tokenizer-model and --vocab-size")
        if not args.reward_funcs:
            raise GrpoError("--reward-funcs is missing: the names that the rewards have in the run")
        check_reward_names(args)
        if segments(own.output):
            raise GrpoError(f"--output {own.output}: there is a ledger already")
        tokenizer = build_tokenizer(args)
        ends = turn_end_token_ids(args, tokenizer)
        tools = partial(tools_of, default=args.environment)
        data = Trajectories(own.input, tokenizer, args, ends, streamed=True, tools=tools)
        groups, left_over, too_long = read_groups(data, args)
        if not groups:
            raise GrpoError(f"no group has --num-generations ({args.num_generations}) rows")
        write(own.output, groups, {dest: getattr(args, dest) for dest in OF_DATA})
    except (GrpoError, OSError) as error:
        print(f"trajectories.py: {error}", file=sys.stderr)
        return 1
    known = sum(c.log_probs is not None for group in groups for c in group.completions if c is not None)
    count = len(groups) * args.num_generations
    print(f"{len(groups):,} groups of {args.num_generations}: {count:,} completions, {known:,} with log-probabilities")
    print(f"left out: {left_over:,} rows of smaller groups, {too_long:,} too long")
    return 0


if __name__ == "__main__":
    sys.exit(main())
