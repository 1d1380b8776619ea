"""Demonstrations: token ids of conversations, and a mask of what the assistant says. Supervised updates learn that."""

import argparse
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.data.answer_column import LAST_TURN, find_answers
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.prompts import LeftOut, Prompt, PromptDataset
from megatron_grpo.data.row_prompt import (
    check_media,
    parse_conversation,
    parse_prompt,
    parse_template_variables,
    parse_tools,
)
from megatron_grpo.data.tokenizer import Tokenizer, arguments_object
from megatron_grpo.utils import progress
from megatron_grpo.utils.batch_sizes import longest_in_words, longest_sequence
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.images import without_bytes


@dataclass(frozen=True)
class Demonstration(Prompt):
    """A demonstration: ``ids`` are the prompt, before the assistant's first turn, and ``completion`` all that follows.

    ``mask``: 1 on the tokens of the completion that the assistant says, with the end of each turn.
    """

    completion: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turns: int = 1


class Demonstrations(PromptDataset):
    """The demonstrations of the concatenated files, by number, read and checked as prompts are (`PromptDataset`).

    A row has ``messages``, of which every turn of the assistant is learnt, or a prompt and an answer. It is longer than
    allowed above --max-prompt-length + --max-completion-length (with an environment, + --max-environment-tokens).
    """

    flag, what = "--sft-data-path", "demonstrations"

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        args: argparse.Namespace,
        end_token_ids: Sequence[int],
        **settings: Any,
    ):
        self._ends = set(end_token_ids)
        super().__init__(paths, tokenizer, args, training=False, **settings)

    def _limit(self) -> tuple[int, str]:
        return longest_sequence(self._args), longest_in_words(self._args)

    def read(self, number: int, decode: bool = False) -> Demonstration:
        file, block, position, where = self._files.find(number)
        try:
            row = self._row(file, block, position)
            found = self._demonstration(number, row, where, file.path.parent)
            if decode and found.images is not None:
                found.images.check()
            return self._fitting(found)
        except GrpoError as error:
            raise LeftOut("bad", f"{where}: {error}") from error

    def _fitting(self, found: Demonstration) -> Demonstration:
        """Return the demonstration as --truncation-strategy wants it; LeftOut or GrpoError for one that is too long."""
        limit, of_flags = self._limit()
        length = len(found.ids) + len(found.completion)
        if length <= limit:
            return found
        if self._args.truncation_strategy == "delete":
            raise LeftOut("long", found.source)
        too_long = f"the demonstration has {length} tokens, more than {of_flags} = {limit}"
        if self._args.truncation_strategy == "raise":
            raise GrpoError(
                f"{too_long}; raise them, or give --truncation-strategy left (cut the prompt) or delete (skip the row)"
            )
        kept = limit - len(found.completion)
        if kept < 1:
            raise GrpoError(f"{too_long}, and no prompt is left if it is cut (--truncation-strategy left)")
        if found.images is not None and found.images.sources:
            raise GrpoError(f"{too_long}, with images, which cannot be cut")
        self._counts["cut"] += 1
        return replace(found, ids=found.ids[-kept:])

    def _demonstration(self, number: int, row: dict[str, Any], where: str, directory: Path) -> Demonstration:
        """Return the demonstration of a row. The paths of its images are relative to ``directory``."""
        reader, images = self.images, None
        media = () if reader is None else reader.media
        said, first = self._said(row, media)
        check_media(row, media, self._args.model_family)
        if reader is not None:
            said, images = reader.read(row, said, directory)
        tools, own = parse_tools(row, said), parse_template_variables(row, said)
        if isinstance(said, str):  # a prompt without a chat template
            ids = self._tokenizer.encode(said)
            answer = self._tokenizer.encode_rest(self._answer(row))
            mask = [0] * len(ids) + [1] * (len(answer) + 1)
            ids, turns = [*ids, *answer, self._tokenizer.eos_id], 1
        else:
            variables = (self._args.chat_template_kwargs or {}) | own
            for message in said:
                _check_calls(message)
            ids, mask = self._rendered(said, first, tools or self._tools(row), variables)
            turns = sum(message["role"] == "assistant" for message in said[first:])
        first = mask.index(1)
        if not first:
            raise GrpoError("the prompt has no tokens")
        if images is not None:
            lengths = images.expanded_lengths(ids)
            if any(own and length > 1 for own, length in zip(mask, lengths, strict=True)):
                raise GrpoError("an image in a turn of the assistant cannot be learnt: leave the turn out")
            first = int(lengths[:first].sum())
            ids, mask = images.expand(ids), np.repeat(mask, lengths).tolist()
            images = replace(images, where=where)
            row = without_bytes(row)
        return Demonstration(number, ids[:first], row, where, {}, images, ids[first:], mask[first:], turns)

    def _said(self, row: dict[str, Any], media: Sequence[str]) -> tuple[str | list[dict[str, Any]], int]:
        """Return the messages up to the assistant's last one, and the first message that can be learnt.

        Of a prompt and an answer that is the answer. A prompt that is no conversation is a string.
        """
        key, system = self._args.prompt_key, self._args.system_prompt
        if row.get(key) is None:
            return parse_conversation(row, key, system, media), 0
        prompt, answer = parse_prompt(row, key, system, media), {"role": "assistant", "content": self._answer(row)}
        return (prompt, 0) if isinstance(prompt, str) else ([*prompt, answer], len(prompt))

    def _rendered(
        self, messages: list[dict[str, Any]], first: int, tools: list[Any] | None, variables: Mapping[str, Any]
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a conversation up to the end of the last turn, and their mask: 0 before message ``first``.

        A turn is the difference between two renderings: of the messages before it, as the policy receives them, and of
        those and itself. GrpoError unless both begin the rendering of the whole conversation.
        """
        ids_of = partial(self._tokenizer.apply_chat_template, tools=tools, variables=variables)
        whole = ids_of(messages, generation_prompt=False)
        mask, end = [0] * (len(whole) + 1), 0
        for number, message in enumerate(messages):
            if number < first or message["role"] != "assistant":
                continue
            before = ids_of(messages[:number], generation_prompt=True)
            after = ids_of(messages[: number + 1], generation_prompt=False)
            after = self._with_end(after, len(before), messages[: number + 1], ids_of)
            if number + 1 == len(messages):
                whole = after
            if whole[: len(before)] != before or whole[: len(after)] != after:
                raise GrpoError(
                    f"the chat template renders the conversation up to message {number + 1}, the assistant's, in "
                    "another way than within the whole of it, so that the policy would learn other tokens than it "
                    "samples: divide the row into one for each turn, or give another --chat-template"
                )
            end = self._end_tokens(number, after, len(before))[-1] + 1
            self._check_turn(number, message, whole[len(before) : end - 1])
            mask[len(before) : end] = [1] * (end - len(before))
        return whole[:end], mask[:end]

    def _with_end(
        self, ids: list[int], begin: int, messages: list[dict[str, Any]], ids_of: Callable[..., list[int]]
    ) -> list[int]:
        """Return ``ids``, the rendering of messages whose last one is the assistant's, with the end of its turn.

        GLM's templates have no end: the policy's turn ends with the first token of the next message, <|user|>, or
        <|observation|> after calls of tools.
        """
        if not self._ends.isdisjoint(ids[begin:]):
            return ids
        *before, last = messages
        calls = {"tool_calls": last["tool_calls"]} if last.get("tool_calls") else {}
        # Without thoughts, which a template can leave out of earlier turns.
        turn = [*before, {"role": "assistant", "content": "1"} | calls]
        alone = ids_of(turn, generation_prompt=False)
        more = ids_of([*turn, {"role": "tool" if calls else "user", "content": "1"}], generation_prompt=False)
        following = more[len(alone) : len(alone) + 1] if more[: len(alone)] == alone else []
        return [*ids, *self._ends.intersection(following)]

    def _end_tokens(self, number: int, ids: Sequence[int], begin: int) -> list[int]:
        """Return the places of the end tokens in ``ids`` from ``begin`` on, where message ``number`` is."""
        places = [place for place in range(begin, len(ids)) if ids[place] in self._ends]
        if not places:
            raise GrpoError(
                f"the chat template ends message {number + 1}, the assistant's, with none of the tokens that end a "
                "completion: give the one that it has (--stop-token-ids), or another --chat-template"
            )
        return places

    def _check_turn(self, number: int, message: Mapping[str, Any], ids: list[int]) -> None:
        """Raise GrpoError if a turn of the assistant cannot be learnt as ``ids``, without its end."""

    def _answer(self, row: Mapping[str, Any]) -> str:
        """Return the answer of a row with a prompt, which is its demonstration."""
        answers = {name: value for name, value in find_answers(row).items() if name != LAST_TURN}
        answer = next(iter(answers.values()), None)
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = str(answer)
        if not isinstance(answer, str) or not answer.strip():
            raise GrpoError(f'a demonstration with a prompt needs a text as its "answer", found {answer!r:.100}')
        return answer


def batch_of(
    demonstrations: Sequence[Demonstration], first_row: int = 0, group_ids: Sequence[int] | None = None
) -> RolloutBatch:
    """Return demonstrations as completions of a batch, with the row ids ``first_row`` + their numbers.

    Each is a group of its own without ``group_ids``.
    """
    numbers = range(len(demonstrations))
    return RolloutBatch.from_completions(
        [one.ids for one in demonstrations],
        [one.completion for one in demonstrations],
        [None for _ in numbers],
        weight_version=0,
        group_ids=numbers if group_ids is None else group_ids,
        row_ids=[first_row + one.id for one in demonstrations],
        sample_ids=numbers,
        finish_reasons=[FinishReason.STOP for _ in numbers],
        response_masks=[one.mask for one in demonstrations],
        turns=[one.turns for one in demonstrations],
    )


def prompts_of(data: Demonstrations) -> dict[bytes, int]:
    """Return the number of a demonstration of each prompt, by the `prompt_key` of its ids: the first in the files."""
    found: dict[bytes, int] = {}
    for number in range(len(data)):
        progress.advance()
        demonstration = data[number]
        if demonstration is not None:
            if demonstration.images is not None and demonstration.images.sources:
                raise GrpoError(
                    f"{demonstration.source}: a demonstration with images has no place in the group of its prompt: "
                    "give --sft-loss-type sft or chord"
                )
            found.setdefault(prompt_key(demonstration.ids), number)
    return found


def prompt_key(ids: Sequence[int]) -> bytes:
    """Return a hash of the token ids of a prompt."""
    return hashlib.blake2b(np.array(ids, np.int32).tobytes(), digest_size=16).digest()


def _check_calls(message: dict[str, Any]) -> None:
    """Raise GrpoError for a tool call without a function, or with arguments that are neither an object nor JSON."""
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "name" not in function or "arguments" not in function:
            raise GrpoError(f'a tool call must be {{"function": {{"name": .., "arguments": ..}}}}, found {call!r:.100}')
        if isinstance(arguments_object(function["arguments"]), str):
            raise GrpoError(f"the arguments of a tool call are not JSON: {function['arguments']!r:.100}")
