"""Tokenised prompts of JSON-lines and Parquet files: checked at the start, or when they are read (streaming)."""

import argparse
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from megatron_grpo.data.answer_column import AnswerCounts
from megatron_grpo.data.blend import read_blend
from megatron_grpo.data.routing import check_source, reward_routes, teacher_routes
from megatron_grpo.data.row_files import Index, RowFiles
from megatron_grpo.data.row_prompt import (
    check_media,
    longest_text,
    messages_of_text,
    parse_prompt,
    parse_template_variables,
    parse_tools,
    pass_rate,
    without_merged_nulls,
)
from megatron_grpo.data.row_sampling import row_sampling, with_row
from megatron_grpo.data.sampler import WINDOW_BYTES, BlendedSampler, PromptSampler
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.utils import progress
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.launch import rank
from megatron_grpo.utils.log import print_rank_0
from megatron_grpo.vision.images import ImageReader, RowImages, without_bytes

if TYPE_CHECKING:  # it imports torch, which takes seconds and which the data tools do not need
    from megatron_grpo.data.tokenizer import Tokenizer

CHECKED_BYTES = 64 * 2**20  # files of up to this size have all rows checked at the start
_PROGRESS_FROM = 10_000  # rows from which a progress bar is shown
_MAX_REPORTED = 3  # bad rows in a message, which a screen of 24 lines holds
_SHORT_TEXT = 100_000  # characters; shorter texts are encoded in any case, for a message with their tokens
_PLAIN = "used unchanged, without the tokenizer's chat template (which chat messages and --system-prompt apply)"
_TOO_LONG = "raise it, or give --truncation-strategy left (keep the last tokens) or delete (skip such rows)"


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt: number in the data set, token ids, row, place of the row (file and line), the fields of
    `Sampling` that the row sets, and its images, each of which has all its tokens among the ids.
    """

    id: int
    ids: list[int]
    row: dict[str, Any]
    source: str
    sampling_fields: Mapping[str, Any] = field(default_factory=dict)
    images: RowImages | None = None  # of a vision-language model

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the sampling parameters of this prompt: the run's ``sampling`` with the fields that the row sets."""
        return with_row(sampling, self.sampling_fields)


class LeftOut(Exception):
    """A row that is skipped: ``reason`` is "bad", "long" or "rate"; the message has the place and the error."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Reading:
    """What one process has found in the files of a `PromptDataset`; ``numbers`` are None for streamed rows."""

    indices: Sequence[Index]
    numbers: np.ndarray | None
    pass_rates: np.ndarray | None
    engine_decodes: bool
    has_videos: bool
    counts: Counter[str]
    bad: list[str]


class PromptDataset:
    """The prompts of the concatenated files, by number; None for a skipped row.

    Files of up to `CHECKED_BYTES` in total (of any size with --curriculum) are checked at the start, and only valid
    rows get numbers. Larger files are ``streamed``: every row has a number and is checked when it is read. A row is
    skipped if it is invalid (--bad-rows skip), longer than --max-prompt-length (--truncation-strategy delete) or, with
    ``training``, outside --min-pass-rate and --max-pass-rate. ``tools`` returns the tools of a row that names
    none, those of its environment. ``images`` reads the images of rows; without it they are invalid. ``check_gold``
    raises GrpoError for a row that the reward functions cannot score. GrpoError lists invalid rows by file and line.
    ``read_by_rank_0``: its `reading`; this process then indexes and checks nothing itself.
    """

    flag, what = "--train-data-path", "prompts"

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: "Tokenizer",
        args: argparse.Namespace,
        training: bool = True,
        streamed: bool = False,
        tools: Callable[[Mapping[str, Any]], list[Any] | None] = lambda row: None,
        images: ImageReader | None = None,
        check_gold: Callable[[dict[str, Any]], None] = lambda row: None,
        read_by_rank_0: Reading | None = None,
    ):
        self._args, self._tokenizer, self._tools, self.images = args, tokenizer, tools, images
        self._check_gold = check_gold
        words, self._weights = read_blend([str(path) for path in paths])
        indices = read_by_rank_0.indices if read_by_rank_0 else None
        self._files = RowFiles(words, WINDOW_BYTES * (len(words) if self._weights else 1), indices)
        if not len(self._files):
            raise GrpoError(f"no {self.what}: {', '.join(words)} has no rows: give files that have some")
        self._routes = reward_routes(args.reward_routing, args.reward_funcs or [])
        self._teacher_flag = "--teacher-server" if args.teacher_server else "--teacher-load-hf"
        teachers = teacher_routes(self._teacher_flag, args.teacher_server or args.teacher_load_hf) if training else {}
        self._teachers = [source for source in teachers if source is not None]
        self._low = 0.0 if args.min_pass_rate is None else args.min_pass_rate
        self._high = 1.0 if args.max_pass_rate is None else args.max_pass_rate
        curriculum = training and args.curriculum
        self._rated = curriculum or (training and (self._low, self._high) != (0.0, 1.0))
        self._counts: Counter[str] = Counter()  # skipped rows by reason, and rows that were cut ("cut")
        self._bad: list[str] = []  # messages about the first bad rows
        self._numbers: np.ndarray | None = None  # row numbers of the valid rows; None when streamed
        self._bounds = self._files.row_bounds  # bounds of the prompt numbers of each file
        self.pass_rates: np.ndarray | None = None
        size = int(self._files.blocks.bytes.sum())
        self.streamed = streamed or (size > CHECKED_BYTES and not curriculum)
        if not self.streamed:
            self._files.held_bytes = size
        if read_by_rank_0 is not None:
            self._take(read_by_rank_0)
        elif self.streamed:
            # A row that is not read yet may set stop words or a constraint.
            self.engine_decodes = args.tokenizer_type == "HuggingFaceTokenizer"
            self.has_videos = images is not None
            print_rank_0(f"{', '.join(words)}: {len(self._files):,} rows, each checked when it is read")
            self._print_first_answer()
        else:
            self._numbers, rates = self._check_all(words)
            self.pass_rates = rates if curriculum else None
        if self._numbers is not None:
            self._bounds = np.searchsorted(self._numbers, self._bounds)
        unused = np.flatnonzero(np.diff(self._bounds) == 0)
        if self._weights and len(unused):
            raise GrpoError(f"{words[unused[0]]} has a weight in {self.flag} but no {self.what}: leave it out")

    def reading(self) -> Reading:
        """Return what this process has found in the files, for the others."""
        found = self._numbers, self.pass_rates, self.engine_decodes, self.has_videos, self._counts, self._bad
        return Reading(self._files.indices, *found)

    def _take(self, reading: Reading) -> None:
        self._numbers, self.pass_rates = reading.numbers, reading.pass_rates
        self.engine_decodes, self.has_videos = reading.engine_decodes, reading.has_videos
        self._counts, self._bad = reading.counts, reading.bad

    def _check_all(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the valid rows and their pass rates (1 if no flag needs pass rates)."""
        numbers, rates, self.engine_decodes, total = [], [], False, len(self._files)
        self.has_videos = False
        answers, in_json, with_start, plain = AnswerCounts(), 0, 0, 0
        for number in tqdm(range(total), f"checking {self.what}", disable=rank() > 0 or total < _PROGRESS_FROM):
            progress.advance()
            try:
                prompt = self.read(number, decode=True)
            except LeftOut as left:
                self._count_left_out(left)
                continue
            numbers.append(number)
            answers.add(prompt.row)
            in_json += self._is_json(prompt.row)
            with_start += self._has_start(prompt.row)
            plain += self._is_plain(prompt.row)
            rates.append(prompt.row["pass_rate"] if self._rated else 1.0)
            # The engine needs the tokenizer for stop words and constraints.
            self.has_videos |= prompt.images is not None and prompt.images.has_videos
            self.engine_decodes |= bool({"stop", "structured_outputs"} & prompt.sampling_fields.keys())
        if self._bad and self._args.bad_rows == "raise":
            raise self._bad_rows()
        if not numbers:
            raise GrpoError(f"no {self.what} left: {'; '.join(self.summary())}")
        for line in self.summary():
            print_rank_0(line)
        more = f" and {len(words) - 1} more files" if len(words) > 1 else ""
        print_rank_0("; ".join(filter(None, (f"{words[0]}{more}: {len(numbers):,} {self.what}", answers.line()))))
        if in_json:
            print_rank_0(f"{in_json:,} prompts are JSON text of messages: they are parsed, and rendered as messages")
        if with_start:
            print_rank_0(f"{with_start:,} prompts bring {self._tokenizer.text_start}: the tokenizer adds no second one")
        if plain:
            print_rank_0(f"{plain:,} prompts are texts, {_PLAIN}")
        return np.array(numbers), np.array(rates)

    def _is_json(self, row: Mapping[str, Any]) -> bool:
        """Return whether the prompt of a row is JSON text of messages."""
        column = row.get(self._args.prompt_key)
        return isinstance(column, str) and messages_of_text(column) is not None

    def _is_plain(self, row: Mapping[str, Any]) -> bool:
        """Return whether the prompt is a text that no chat template makes or has made, and the tokenizer has one."""
        if self._args.system_prompt is not None or not getattr(self._tokenizer, "has_chat_template", False):
            return False
        column = row.get(self._args.prompt_key)
        if not isinstance(column, str) or self._is_json(row):
            return False
        return not any(token in column for token in self._tokenizer.special_tokens)

    def _has_start(self, row: Mapping[str, Any]) -> bool:
        """Return whether the prompt of a row is a text that begins with the tokens which the tokenizer adds."""
        column, start = row.get(self._args.prompt_key), self._tokenizer.text_start
        return bool(start) and isinstance(column, str) and self._args.system_prompt is None and column.startswith(start)

    def _print_first_answer(self) -> None:
        """Print the column of the first row's answer, and its form of prompt; the block is read apart, and not kept."""
        file = next(file for file in self._files.files if len(file.blocks.rows))
        answers = AnswerCounts()
        try:
            row = file.row(file.read(0), 0)
            answers.add(row)
        except GrpoError:
            return  # the row is reported when it is read
        if line := answers.line():
            print_rank_0(f"{line}, in the first row ({file.where(0)})")
        if self._is_json(row):
            print_rank_0(
                "the first row's prompt is JSON text of messages: such prompts are parsed, and rendered as messages"
            )
        if self._is_plain(row):
            print_rank_0(f"the first row's prompt is a text: such prompts are {_PLAIN}")
        if self._has_start(row):
            print_rank_0(
                f"the first row's prompt brings {self._tokenizer.text_start}: the tokenizer adds no second one"
            )

    def __len__(self) -> int:
        return len(self._files) if self._numbers is None else len(self._numbers)

    def __getitem__(self, index: int) -> Prompt | None:
        if self._numbers is not None:
            try:
                return replace(self.read(int(self._numbers[index])), id=index)
            except LeftOut as left:  # rank 0 has found it valid
                host = socket.gethostname()
                raise GrpoError(f"host {host}: {left}; rank 0's host could read it: give both the same files") from left
        before, prompt = self._counts.total(), None
        try:
            prompt = self.read(index, decode=True)
        except LeftOut as left:
            self._count_left_out(left)
            if left.reason == "bad" and self._args.bad_rows == "raise":
                raise self._bad_rows() from left
            if left.reason == "bad" and self._counts["bad"] <= _MAX_REPORTED:
                print_rank_0(f"left out {left}")
        if self._counts.total() > before and str(before + 1).rstrip("0") == "1":  # report at powers of ten
            for line in self.summary():
                print_rank_0(f"so far {line}")
        return prompt

    def images_of(self, index: int) -> RowImages:
        """Return the images of a prompt that has been drawn."""
        prompt = self[index]
        assert prompt is not None and prompt.images is not None
        return prompt.images

    def __iter__(self) -> Iterator[Prompt]:
        return (prompt for index in range(len(self)) if (prompt := self[index]) is not None)

    def first(self, count: int | None) -> list[Prompt]:
        """Return the first ``count`` prompts of the files, or all for None."""
        return list(islice(self, count))

    def first_of_files(self, count: int | None) -> list[list[Prompt]]:
        """Return the first ``count`` prompts of each file, or all for None."""

        def of(begin: int, end: int) -> Iterator[Prompt]:
            return (prompt for index in range(begin, end) if (prompt := self[index]) is not None)

        return [list(islice(of(int(begin), int(end)), count)) for begin, end in pairwise(self._bounds)]

    def row_in_file(self, prompt: Prompt) -> int:
        """Return the number of a prompt's row in its file, from 0; rows that are left out count, too."""
        row, bounds = prompt.id if self._numbers is None else int(self._numbers[prompt.id]), self._files.row_bounds
        return row - int(bounds[np.searchsorted(bounds, row, side="right") - 1])

    def sampler(self) -> PromptSampler | BlendedSampler:
        """Build the sampler of the prompt order, from --seed, --no-shuffle, --curriculum and the weights of files."""

        def of(first: int, last: int) -> PromptSampler:
            begin, end = int(self._bounds[first]), int(self._bounds[last])
            rates = None if self.pass_rates is None else self.pass_rates[begin:end]
            blocks = self._files.blocks.part(*self._files.block_bounds[[first, last]]) if self.streamed else None
            return PromptSampler(end - begin, self._args.seed, not self._args.no_shuffle, rates, blocks, self.flag)

        count = len(self._files.files)
        if self._weights is None:
            return of(0, count)
        return BlendedSampler([of(f, f + 1) for f in range(count)], self._weights, self._bounds[:-1].tolist())

    def summary(self) -> list[str]:
        """Return one line for each reason for which rows were skipped or cut."""
        (_, of_flags), total = self._limit(), f"of {len(self._files):,} {self.what}"
        lines = {
            "bad": ("left out", f"{total} that are invalid: {'; '.join(self._bad)}"),
            "long": (
                "left out",
                f"{total} that are longer than {of_flags} (raise it, or give --truncation-strategy left to keep their "
                "last tokens)",
            ),
            "rate": (
                "left out",
                f"{total} with a pass_rate below --min-pass-rate ({self._low:g}) or above --max-pass-rate "
                f"({self._high:g})",
            ),
            "cut": ("cut", f"{total} on the left to {of_flags}"),
        }
        counts = self._counts
        return [f"{did} {counts[name]:,} {what}" for name, (did, what) in lines.items() if counts[name]]

    def _limit(self) -> tuple[int | None, str]:
        """Return the most tokens of a row, and the flags that say so."""
        limit = self._args.max_prompt_length
        return limit, f"--max-prompt-length {limit}"

    def _count_left_out(self, left: LeftOut) -> None:
        self._counts[left.reason] += 1
        if left.reason == "bad" and len(self._bad) < _MAX_REPORTED:
            self._bad.append(str(left))

    def _bad_rows(self) -> GrpoError:
        rows, bad = "\n".join(self._bad), self._counts["bad"]
        if bad == len(self._files) > 1:  # one mistake in all of them, and nothing to go on with
            return GrpoError(
                f"{rows}\nall {bad:,} rows are invalid: correct the files, or the flag that is named above"
            )
        more = f"\nand {bad - len(self._bad):,} more, which tools/data/check.py lists" if bad > len(self._bad) else ""
        return GrpoError(f"{rows}{more} (give --bad-rows skip to skip such rows)")

    def read(self, number: int, decode: bool = False) -> Prompt:
        """Return the prompt of row ``number`` of the files; raise LeftOut for a row that is skipped.

        ``decode``: find damaged images, too.
        """
        file, block, position, where = self._files.find(number)
        try:
            row = self._row(file, block, position)
            ids, images = self._tokens(row, file.path.parent)
            if decode and images is not None:
                images.check()
            fields = row_sampling(row, self._args, self._tokenizer.special_tokens)
            check_source("--reward-routing", self._routes, row)
            check_source(self._teacher_flag, self._teachers, row)
            self._check_gold(row)
            rate = pass_rate(row) if self._rated else 1.0
        except GrpoError as error:
            raise LeftOut("bad", f"{where}: {error}") from error
        limit = self._args.max_prompt_length
        if limit is not None and len(ids) > limit:
            if self._args.truncation_strategy == "delete":
                raise LeftOut("long", where)
            if images is not None and images.sources:
                raise LeftOut("bad", f"{where}: {len(ids)} tokens, more than --max-prompt-length {limit}, with images")
            self._counts["cut"] += 1
            ids = ids[-limit:]
        if not self._low <= rate <= self._high:
            raise LeftOut("rate", where)
        if images is not None:
            images, row = replace(images, where=where), without_bytes(row)
        return Prompt(number, ids, row, where, fields, images)

    def _row(self, file, block: int, position: int) -> dict[str, Any]:
        """Return a row of a file, without the nulls of columns that other rows have."""
        row = file.row(block, position)
        return without_merged_nulls(row, self._args.prompt_key) if file.merges_shapes else row

    def _tokens(self, row: dict[str, Any], directory: Path) -> tuple[list[int], RowImages | None]:
        """Return the ids of the row's prompt, and its images, whose files are relative to ``directory``."""
        reader, images = self.images, None
        media = () if reader is None else reader.media
        prompt = parse_prompt(row, self._args.prompt_key, self._args.system_prompt, media)
        check_media(row, media, self._args.model_family)
        if reader is not None:
            prompt, images = reader.read(row, prompt, directory)
        self._check_characters(longest_text(prompt))
        tools, own = parse_tools(row, prompt), parse_template_variables(row, prompt)
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt)
        else:
            variables = (self._args.chat_template_kwargs or {}) | own
            ids = self._tokenizer.apply_chat_template(prompt, tools or self._tools(row), variables)
        if not ids:
            raise GrpoError("the prompt has no tokens")
        if images is not None:
            ids = images.expand(ids)
        limit = self._args.max_prompt_length
        if limit is not None and len(ids) > limit and self._args.truncation_strategy == "raise":
            raise GrpoError(f"the prompt has {len(ids)} tokens, more than --max-prompt-length {limit}; {_TOO_LONG}")
        return ids, images

    def _check_characters(self, count: int) -> None:
        """Refuse a text that is too long even if all tokens are the longest one, without the time to encode it.

        With --truncation-strategy left every text is encoded: its last tokens are kept.
        """
        limit, strategy = self._args.max_prompt_length, self._args.truncation_strategy
        if limit is None or strategy == "left" or count <= max(limit * self._tokenizer.longest_token, _SHORT_TEXT):
            return
        if strategy == "delete":
            raise LeftOut("long", f"{count} characters")
        raise GrpoError(
            f"the prompt has {count} characters, and a token at most {self._tokenizer.longest_token}: more than "
            f"--max-prompt-length {limit}; {_TOO_LONG}"
        )


def draw(dataset: PromptDataset, sampler: PromptSampler | BlendedSampler, count: int) -> list[Prompt]:
    """Return the next ``count`` prompts in the sampler's order.

    The next row replaces a skipped row; if files have weights, the next row of the same file.
    """
    prompts: list[Prompt] = []
    while len(prompts) < count:
        (number,) = sampler.next(1)
        for _ in range(2 * len(dataset)):  # at least one whole epoch, from any position
            prompt = dataset[number]
            if prompt is not None:
                prompts.append(prompt)
                break
            number = sampler.replace(number)
        else:
            raise GrpoError(f"no {dataset.what} left in all files: {'; '.join(dataset.summary())}")
    return prompts
