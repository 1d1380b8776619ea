"""Prompt files (JSON lines, Parquet) as tokenised prompts, and the sampler whose position a checkpoint keeps."""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.parquet
from tqdm import tqdm

from megatron_grpo.data.row_sampling import row_sampling, with_row
from megatron_grpo.errors import GrpoError

if TYPE_CHECKING:  # it brings torch, for which the data tools need not wait
    from megatron_grpo.data.tokenizer import Tokenizer
    from megatron_grpo.rollout.engine import Sampling

_PROGRESS_FROM = 10_000  # rows


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt: its number in the data set, its tokens, the file's row, where that stands, and the fields
    of `Sampling` that the row sets.
    """

    id: int
    ids: list[int]
    row: dict[str, Any]
    source: str
    sampling_fields: Mapping[str, Any] = field(default_factory=dict)

    def sampling(self, sampling: "Sampling") -> "Sampling":
        """How its completions are sampled, in a run that samples others so."""
        return with_row(sampling, self.sampling_fields)


class PromptDataset:
    """The prompts of several files one after the other, all checked and tokenised at the start.

    Reads --prompt-key, --system-prompt, --max-prompt-length and --truncation-strategy from args, and what a row's own
    sampling (row_sampling.py) depends on. Raises GrpoError that names the file and line of the first row that cannot be
    used.
    """

    def __init__(self, paths: Sequence[str | Path], tokenizer: "Tokenizer", args: argparse.Namespace):
        rows = [item for path in paths for item in read_rows(Path(path))]
        if not rows:
            raise GrpoError(f"no prompts: {', '.join(map(str, paths))} has no rows")
        rank = int(os.environ.get("RANK", "0"))
        limit, strategy = args.max_prompt_length, args.truncation_strategy
        self._ids: list[np.ndarray] = []  # a tenth of the memory of lists
        self._rows: list[tuple[str, dict[str, Any]]] = []
        self._sampling: list[dict[str, Any]] = []  # of each row
        cut = 0
        for where, row in tqdm(rows, "tokenising prompts", disable=rank != 0 or len(rows) < _PROGRESS_FROM):
            ids = _tokenise(where, row, tokenizer, args.prompt_key, args.system_prompt)
            if limit is not None and len(ids) > limit:
                if strategy == "delete":
                    continue
                if strategy == "raise":
                    raise GrpoError(
                        f"{where}: the prompt has {len(ids)} tokens, more than --max-prompt-length {limit}; raise it, "
                        "or choose --truncation-strategy left (keep the last tokens) or delete (leave such rows out)"
                    )
                ids, cut = ids[-limit:], cut + 1
            self._ids.append(np.asarray(ids, dtype=np.int32))
            self._rows.append((where, row))
            self._sampling.append(_at(where, row_sampling, row, args))
        deleted = len(rows) - len(self._rows)
        if not self._rows:
            raise GrpoError(
                f"no prompts left: all {deleted} are longer than --max-prompt-length {limit}; raise it, or choose "
                "--truncation-strategy left (keep the last tokens)"
            )
        if deleted and rank == 0:
            print(f"left out {deleted} of {len(rows)} prompts that are longer than --max-prompt-length {limit}")
        if cut and rank == 0:
            print(f"cut {cut} of {len(rows)} prompts on the left to --max-prompt-length {limit}")

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[tuple[str, dict[str, Any]]]:
        """(where, row) of every prompt."""
        return self._rows

    def __getitem__(self, index: int) -> Prompt:
        source, row = self._rows[index]
        return Prompt(index, self._ids[index].tolist(), row, source, self._sampling[index])

    @property
    def engine_decodes(self) -> bool:
        """Whether a row sets stop words or a constraint, for which the engine needs the tokenizer."""
        return any({"stop", "structured_outputs"} & fields.keys() for fields in self._sampling)

    def pass_rates(self) -> np.ndarray:
        """``[len(self)]``, each row's ``pass_rate``: how often some policy solved it, 0 to 1; GrpoError without one."""
        return np.array([_at(where, _pass_rate, row) for where, row in self._rows])

    def keep_pass_rates(self, low: float, high: float) -> None:
        """Leave out prompts whose pass rate is not in [low, high] (--min-pass-rate, --max-pass-rate)."""
        kept = np.flatnonzero((low <= self.pass_rates()) & (self.pass_rates() <= high)).tolist()
        if not kept:
            raise GrpoError(
                f"no prompts left: the pass_rate of all {len(self)} is below --min-pass-rate ({low:g}) or above "
                f"--max-pass-rate ({high:g})"
            )
        if os.environ.get("RANK", "0") == "0":
            print(f"kept {len(kept)} of {len(self)} prompts with a pass_rate from {low:g} to {high:g}")
        self._ids, self._rows, self._sampling = (
            [column[i] for i in kept] for column in (self._ids, self._rows, self._sampling)
        )


def _at(where: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns; its GrpoError with the place in front."""
    try:
        return function(*arguments)
    except GrpoError as error:
        raise GrpoError(f"{where}: {error}") from error


def _pass_rate(row: Mapping[str, Any]) -> float:
    rate = row.get("pass_rate")
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate <= 1:
        raise GrpoError(
            f'"pass_rate" is {rate!r}: --curriculum, --min-pass-rate and --max-pass-rate need a number from 0 to 1 in '
            "every row"
        )
    return float(rate)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (where, row) for every row of a .jsonl, .json (one object per line) or .parquet file."""
    if path.is_dir():
        raise GrpoError(f"{path} is a directory: name the .jsonl or .parquet files in it")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise GrpoError(f"{path}: prompts are read from .jsonl or .parquet files, not from {path.suffix or 'this'}")
    if not path.is_file():
        raise GrpoError(f"{path}: no such file")
    if path.suffix == ".parquet":
        try:
            # ParquetFile and not read_table, which takes directories named like "split=train" for columns.
            table = pyarrow.parquet.ParquetFile(path).read()
        except (pyarrow.ArrowException, OSError) as error:
            raise GrpoError(f"{path}: not a readable Parquet file: {error}") from error
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(table.to_pylist(), 1))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise GrpoError(f"{path}:{number}: not valid JSON ({error}); expected one object per line") from error
            if not isinstance(row, dict):
                raise GrpoError(f"{path}:{number}: expected a JSON object, found {_kind(row)}")
            yield f"{path}:{number}", row


def _tokenise(where: str, row: dict[str, Any], tokenizer: "Tokenizer", key: str, system: str | None) -> list[int]:
    prompt = _at(where, parse_prompt, row, key, system)
    ids = _at(where, tokenizer.encode if isinstance(prompt, str) else tokenizer.apply_chat_template, prompt)
    if not ids:
        raise GrpoError(f"{where}: the prompt has no tokens")
    return ids


def parse_prompt(row: dict[str, Any], key: str, system: str | None = None) -> str | list[dict[str, Any]]:
    """The row's prompt, from column ``key`` or else ``messages``: a string as it stands, or chat messages.

    With a system prompt, a string becomes the user's message after it. Raises GrpoError saying what was expected.
    """
    column = key if row.get(key) is not None else "messages"
    prompt = row.get(column)
    if prompt is None:
        raise GrpoError(
            f'no prompt: expected a column "{key}" (--prompt-key) or "messages", found {", ".join(row) or "no column"}'
        )
    if isinstance(prompt, str):
        _check_text(f'"{column}"', prompt)
        return (
            prompt if system is None else [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        )
    if not isinstance(prompt, list):
        raise GrpoError(f'"{column}" must be a string or a list of messages, found {_kind(prompt)}')
    if not prompt:
        raise GrpoError(f'"{column}" is an empty list of messages')
    messages = [_check_message(f'message {number} of "{column}"', message) for number, message in enumerate(prompt, 1)]
    if messages[-1]["role"] == "assistant":
        raise GrpoError(f'"{column}" ends with an assistant message; that one is to be generated, so leave it out')
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise GrpoError(f'"{column}" has a system message of its own; leave out either that or --system-prompt')
    return [{"role": "system", "content": system}, *messages]


def _check_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise GrpoError(f'{name} must be an object with "role" and "content", found {_kind(message)}')
    # Parquet gives every message the columns of all of them, and templates ask whether a key is there.
    message = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if key not in message:
            raise GrpoError(f'{name} has no "{key}"')
        _check_text(f'"{key}" of {name}', message[key])
    return message


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise GrpoError(f"{name} must be a string, found {_kind(text)}")
    if not text.strip():
        raise GrpoError(f"{name} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrpoError(f"{name} is not valid Unicode: {error}") from error


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


class PromptSampler:
    """Numbers of prompts without end: every epoch a fresh permutation, the same on every rank.

    With ``pass_rates`` (``[num_prompts]``) each epoch goes from easy to hard, in its permutation where rates are equal.
    The order is a function of (seed, epoch) alone, so a checkpoint keeps the position, counted in prompts, and the
    prompts that were given back.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool = True, pass_rates: np.ndarray | None = None):
        self.num_prompts, self.seed, self.shuffle = num_prompts, seed, shuffle
        self.curriculum, self._pass_rates = pass_rates is not None, pass_rates
        self.epoch = 0
        self.position = 0  # prompts of this epoch already handed out, below num_prompts
        self.returned: list[int] = []  # handed out and given back: the next ones
        self._order = self._permutation()

    def _permutation(self) -> np.ndarray:
        order = np.arange(self.num_prompts)
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_prompts)
        return order if self._pass_rates is None else order[np.argsort(-self._pass_rates[order], kind="stable")]

    @property
    def consumed(self) -> int:
        """Prompts handed out and kept, over all epochs."""
        return self.epoch * self.num_prompts + self.position - len(self.returned)

    def give_back(self, numbers: Sequence[int]) -> None:
        """Put prompts that were not used in front of those to come, in this order."""
        self.returned = [*numbers, *self.returned]

    def next(self, n: int) -> list[int]:
        """The next n prompt numbers; runs into the following epochs when this one ends."""
        numbers, self.returned = self.returned[:n], self.returned[n:]
        while len(numbers) < n:
            part = self._order[self.position : self.position + n - len(numbers)].tolist()
            numbers += part
            self.position += len(part)
            if self.position == self.num_prompts:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._permutation()
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands and what its order depends on."""
        names = "num_prompts seed shuffle curriculum epoch position returned".split()
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved position; GrpoError when that belongs to another order."""
        flags = {
            "num_prompts": "--train-data-path (number of prompts)",
            "seed": "--seed",
            "shuffle": "shuffling (--no-shuffle)",
            "curriculum": "--curriculum",
        }
        for name, flag in flags.items():
            if state[name] != getattr(self, name):
                raise GrpoError(
                    f"the checkpoint's data position belongs to other data: {flag} was {state[name]} and is now "
                    f"{getattr(self, name)}; restore it, or start the data anew with --finetune"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.returned = list(state["returned"])
        self._order = self._permutation()
