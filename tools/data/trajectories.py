"""Write completions of any system, with their rewards, into a ledger for --train-only.

    python tools/data/trajectories.py --input a.jsonl b.parquet --output LEDGER \\
        --load-hf MODEL --num-generations 8 --reward-funcs accuracy
    torchrun ... pretrain_grpo.py --train-only LEDGER --load-hf MODEL --num-generations 8 --reward-funcs accuracy ...

The other flags are those of the run that will learn: tokenizer, chat template, lengths. A row is a completion:

    prompt, completion    the prompt as in a row of prompts, and the text that the policy said behind it, or messages
    or messages           every turn of the assistant is learnt; one that the chat template changes is refused
    reward or rewards     a number, or one for each of --reward-funcs, whose names these rewards get; null: not scored
    group                 optional, a text or number: rows of one group are compared; without it those of one prompt
    truncated             optional, true: the completion does not end with the end of a turn

or, as tokens: prompt_ids, completion_ids (with the token that ends a turn, unless truncated), and perhaps log_probs,
the log-probability of each token of the completion under the policy that sampled it, at --temperature.
docs/ledger.md says what a run learns with and without them.

--num-generations rows are a group of the run, written when it is whole. A larger group of rows is divided; what is left
over is left out, and so are rows that are too long with --truncation-strategy delete. A bad row ends the program, and
leaves no ledger.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import numpy.typing as npt

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.data.arguments import resolve_chat_template, resolve_system_prompt
from megatron_grpo.data.demonstrations import Demonstration, Demonstrations, prompt_key
from megatron_grpo.data.end_of_turn import describe, turn_end_token_ids
from megatron_grpo.data.json_column import json_column, kind
from megatron_grpo.data.prompts import LeftOut, Prompt
from megatron_grpo.data.row_prompt import parse_conversation, parse_prompt
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

BATCH = 16  # groups of a batch
TOKENS = 2**15  # of a record with several groups: a run reads the whole record of a group
REPORTED = 10_000  # rows of a line of progress
FIRST_ROW = 1 << 40  # of trajectories: no row of --train-data-path
LARGEST = float(np.finfo(np.float32).max)  # of rewards and log-probabilities


class Trajectories(Demonstrations):
    """The completions of the files, by number, as `Demonstrations`; a row with token ids is taken as it is."""

    flag, what = "--input", "trajectories"

    def _demonstration(self, number: int, row: dict[str, Any], where: str, directory: Path) -> Demonstration:
        truncated = row.get("truncated")
        if truncated not in (None, False, True):
            raise GrpoError(f'"truncated" must be true or false, found {truncated!r:.100}')
        if row.get("completion_ids") is not None:
            ids, completion = (
                _token_ids(row, name, self._args.vocab_size) for name in ("prompt_ids", "completion_ids")
            )
            # A stop word that is no token ends a completion without an end token.
            if not (truncated or completion[-1] in self._ends or self._args.stop_words):
                ends = describe(sorted(self._ends), self._tokenizer)
                raise GrpoError(
                    f'"completion_ids" ends with {completion[-1]}, which ends no turn: add the token that does '
                    f'({ends}; --stop-token-ids for others), or give "truncated": true'
                )
            return Demonstration(number, ids, row, where, {}, None, completion, [1] * len(completion))
        if row.get("log_probs") is not None:
            raise GrpoError('"log_probs" are of tokens: give "prompt_ids" and "completion_ids", too')
        found = super()._demonstration(number, row, where, directory)
        completion = found.completion
        if truncated and len(completion) < 2:
            raise GrpoError("a truncated completion has no token")
        if truncated or self._ends.intersection(completion[-2:-1]):  # the text can bring its end
            return replace(found, completion=completion[:-1], mask=found.mask[:-1])
        return found

    def _said(self, row: dict[str, Any], media: Sequence[str]) -> tuple[str | list[dict[str, Any]], int]:
        key, completion = self._args.prompt_key, row.get("completion")
        if row.get(key) is None and completion is not None:
            raise GrpoError(f'"completion" needs its prompt in "{key}" (--prompt-key)')
        if row.get(key) is None or not isinstance(completion, list) or _only_text(completion) is not None:
            return super()._said(row, media)
        prompt = parse_prompt(row, key, self._args.system_prompt, media)
        last = completion[-1] if completion else None
        if isinstance(prompt, str) or not isinstance(last, dict) or last.get("role") != "assistant":
            raise GrpoError(
                '"completion" can be messages that end with the assistant\'s, behind a prompt of messages, found '
                f"{last!r:.100} as the last one, behind {kind(prompt)}"
            )
        return parse_conversation({"messages": [*prompt, *completion]}, key, None, media), len(prompt)

    def _answer(self, row: Mapping[str, Any]) -> str:
        text = _only_text(row.get("completion"))
        if text is None:
            raise GrpoError(
                f'"completion" must be a text, or messages of the assistant, found {row.get("completion")!r:.100}'
            )
        return text

    def _rendered(
        self, messages: list[dict[str, Any]], first: int, tools: list[Any] | None, variables: Mapping[str, Any]
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt and of a completion, which is what the policy said behind the generation prompt.

        The chat template would change the text of a completion (Qwen3's adds thoughts, DeepSeek-R1's leaves them out):
        it tells the token that ends the turn, no more. Further turns are rendered by it, and `_check_turn` compares.
        """
        *prompt, said = messages
        if first != len(prompt) or said.keys() > {"role", "content"}:
            return super()._rendered(messages, first, tools, variables)
        ids_of = partial(self._tokenizer.apply_chat_template, tools=tools, variables=variables)
        one, two = (ids_of([*prompt, said | {"content": text}], generation_prompt=False) for text in ("1", "2"))
        places = (place for place, ids in enumerate(zip(one, two, strict=False)) if ids[0] != ids[1])
        place = next(places, len(one))  # of the text in its turn
        one = self._with_end(one, place, [*prompt, said | {"content": "1"}], ids_of)
        end = one[self._end_tokens(first, one, place)[0]]
        ids = ids_of(prompt, generation_prompt=True)
        completion = [*self._tokenizer.encode_rest(said["content"]), end]
        return [*ids, *completion], [0] * len(ids) + [1] * len(completion)

    def _check_turn(self, number: int, message: Mapping[str, Any], ids: list[int]) -> None:
        said, learnt = message["content"], self._tokenizer.decode(ids, skip_special_tokens=False)
        if not learnt.startswith(said) or (learnt != said and not message.get("tool_calls")):
            raise GrpoError(
                f"the chat template changes message {number + 1}, the assistant's, from {said!r:.100} to "
                f'{learnt!r:.100}, which the policy did not say: give a row for each turn, with "prompt" and a text as '
                '"completion", or token ids'
            )

    def _fitting(self, found: Demonstration) -> Demonstration:
        limit, of_flags = self._limit()
        length = len(found.ids) + len(found.completion)
        if length <= limit:
            return found
        if self._args.truncation_strategy == "delete":
            raise LeftOut("long", found.source)
        raise GrpoError(
            f"the row has {length} tokens, more than {of_flags} = {limit}: raise them, or give --truncation-strategy "
            "delete (leave such rows out)"
        )


def _only_text(completion: Any) -> str | None:
    """Return the text of a completion: itself, or that of a single message without anything else; None if none."""
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], dict):
        message = {name: value for name, value in completion[0].items() if value is not None}
        if message.keys() == {"role", "content"} and message["role"] == "assistant":
            completion = message["content"]
    return completion if isinstance(completion, str) else None


def _token_ids(row: Mapping[str, Any], name: str, vocab_size: int) -> list[int]:
    ids = json_column(row.get(name))
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise GrpoError(f'"{name}" must be a list of token ids from 0 to {vocab_size - 1}, found {ids!r:.100}')
    return ids


def _log_probs(row: Mapping[str, Any], count: int) -> npt.NDArray[np.float32] | None:
    values = json_column(row.get("log_probs"))
    if values is None:
        return None
    numbers = isinstance(values, list) and all(isinstance(x, int | float) and -LARGEST <= x <= 1e-3 for x in values)
    if not numbers or len(values) != count:
        raise GrpoError(f'"log_probs" must have a number up to 0 for each of {count} tokens, found {values!r:.100}')
    return np.array(values, np.float32)


def _rewards(row: Mapping[str, Any], names: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return the rewards of a row, NaN for null."""
    found = json_column(row.get("rewards"))
    if found is None:
        if "reward" not in row:
            raise GrpoError('there is no "reward" and no "rewards"')
        found = [row["reward"]]
    values = [math.nan if x is None else x for x in found] if isinstance(found, list) else []
    valid = all(type(x) in (int, float, bool) and (x != x or abs(x) <= LARGEST) for x in values)
    if len(values) != len(names) or not valid:
        raise GrpoError(
            f"the rewards must be {len(names)} numbers (--reward-funcs {' '.join(names)}) of at most {LARGEST:.2g}, "
            f"found {found!r:.100}"
        )
    return np.array(values, np.float32)


@dataclass(frozen=True)
class Row:
    """A checked row, small: a group can wait for its rows until the end of the files."""

    number: int
    source: str
    prompt: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    log_probs: npt.NDArray[np.float32] | None
    truncated: bool
    turns: int
    rewards: npt.NDArray[np.float32]

    @classmethod
    def of(cls, found: Demonstration, names: Sequence[str]) -> "Row":
        """Return the row of a trajectory; GrpoError for a bad one."""
        prompt, tokens = np.array(found.ids, np.int32), np.array(found.completion, np.int32)
        known = _log_probs(found.row, len(tokens)), bool(found.row.get("truncated")), found.turns
        return cls(
            found.id, found.source, prompt, tokens, np.array(found.mask, bool), *known, _rewards(found.row, names)
        )

    def completion(self) -> Completion:
        """Return the completion of a ledger."""
        reason = "length" if self.truncated else "stop"
        log_probs = None if self.log_probs is None else self.log_probs.tolist()
        mask = None if self.mask.all() else self.mask.astype(int).tolist()
        versions = [0] * len(self.tokens)
        return Completion(0, self.tokens.tolist(), log_probs, reason, versions, response_mask=mask, turns=self.turns)


def read_groups(data: Trajectories, args: argparse.Namespace, counts: Counter[str]) -> Iterator[Group]:
    """Yield groups of --num-generations rows, each when its last row is read; count them, and what is left out."""
    waiting: dict[Any, list[Row]] = {}
    prompts: dict[str, bytes] = {}  # of the rows with a group
    for number in range(len(data)):
        if number and number % REPORTED == 0:
            print(f"{number:,} of {len(data):,} rows", flush=True)
        try:
            found = data.read(number)
        except LeftOut as left:
            if left.reason == "bad":
                raise GrpoError(str(left)) from left
            counts["too long"] += 1
            continue
        key, group = prompt_key(found.ids), found.row.get("group")
        try:
            row = Row.of(found, args.reward_funcs)
            if group is not None and prompts.setdefault(str(group), key) != key:
                raise GrpoError("the rows of its group have different prompts")
        except GrpoError as error:
            raise GrpoError(f"{found.source}: {error}") from error
        members = waiting.setdefault(key if group is None else str(group), [])
        members.append(row)
        if len(members) == args.num_generations:
            del waiting[key if group is None else str(group)]
            first, birth = members[0], counts["groups"] // BATCH
            prompt = Prompt(FIRST_ROW + first.number, first.prompt.tolist(), {}, first.source)
            rewards = np.stack([member.rewards for member in members])
            counts["groups"] += 1
            counts["known"] += sum(member.log_probs is not None for member in members)
            longest = max(len(member.prompt) + len(member.tokens) for member in members)
            counts["longest"] = max(counts["longest"], longest)
            yield Group(prompt, birth, tuple(member.completion() for member in members), rewards)
    counts["left over"] = sum(map(len, waiting.values()))


def records(groups: Sequence[Group]) -> Iterator[dict[int, Group]]:
    """Yield the groups of a batch by their numbers, one or several with at most TOKENS tokens in each record."""
    record: dict[int, Group] = {}
    tokens = 0
    for number, group in enumerate(groups):
        own = sum(len(completion.token_ids) for completion in group.completions if completion is not None)
        if record and tokens + own > TOKENS:
            yield record
            record, tokens = {}, 0
        record[number] = group
        tokens += own
    yield record


def write(directory: Path, groups: Iterable[Group], counts: Counter[str], run: dict[str, Any]) -> None:
    """Write a new ledger of the groups of `read_groups`, with their longest sequence; leave no file at an error."""
    ledger = Ledger(directory, Content(), 0, run, producer=0, leads=True, stop=True)
    batches = []
    try:
        for number, part in enumerate(batched(groups, BATCH)):
            for record in records(part):
                ledger.append(number, record)
            ledger.flush()
            keys = tuple(GroupKey(number, n) for n in range(len(part)))
            batches.append(BatchRecord(number, keys, None, {}, 0, 0, None))
        run["longest_sequence"] = counts["longest"]  # the first batch writes the flags: before that it is no ledger
        for batch in batches:
            ledger.record(batch)
        ledger.close()
    except BaseException:
        ledger.close()
        for path in segments(directory):
            path.unlink()
        raise


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
        if args.truncation_strategy == "left":
            raise GrpoError(
                "--truncation-strategy left would cut prompts after they were answered: give raise or delete"
            )
        if segments(own.output):
            raise GrpoError(f"--output {own.output}: there is a ledger already")
        tokenizer = build_tokenizer(args)
        ends = turn_end_token_ids(args, tokenizer)
        tools = partial(tools_of, default=args.environment)
        data = Trajectories(own.input, tokenizer, args, ends, streamed=True, tools=tools)
        counts: Counter[str] = Counter()
        write(own.output, read_groups(data, args, counts), counts, {dest: getattr(args, dest) for dest in OF_DATA})
        if not counts["groups"]:
            raise GrpoError(f"no group has --num-generations ({args.num_generations}) rows")
    except (GrpoError, OSError) as error:
        print(f"trajectories.py: {error}", file=sys.stderr)
        return 1
    groups, known = counts["groups"], counts["known"]
    count = groups * args.num_generations
    print(f"{groups:,} groups of {args.num_generations}: {count:,} completions, {known:,} with log-probabilities")
    print(f"left out: {counts['left over']:,} rows of smaller groups, {counts['too long']:,} too long")
    return 0


if __name__ == "__main__":
    sys.exit(main())
