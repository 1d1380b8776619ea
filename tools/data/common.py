"""Shared code of the data tools: read original files, convert and check rows, split and write them, print a summary."""

import argparse
import hashlib
import json
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow
import pyarrow.parquet
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_grpo.data.row_files import BLOCK_BYTES, RowFiles
from megatron_grpo.utils.errors import GrpoError

Row = dict[str, Any]
Convert = Callable[[Row, argparse.Namespace], Row]
Originals = Iterator[tuple[str, Callable[[], Row]]]  # (place, function that reads the row)
Key = Callable[[Row], str]  # the text that decides about the file of a row: rows with equal texts are in one file
BOXED = "Put the final answer in \\boxed{}."
_MAX_REPORTED = 20  # lines about bad rows that are printed
_SAME = 3  # bad rows with the same error that are printed


class Bytes:
    """A tokenizer without a vocabulary, with one token for each byte of a text or of the messages' contents."""

    special_tokens: ClassVar[dict[str, int]] = {}
    longest_token = 1
    text_start = ""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(
        self, messages: list[dict], tools: list | None = None, variables: dict | None = None
    ) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


def prompt_text(row: Row) -> str:
    """Return the texts of a row's prompt in lower case, with one space between words: equal for equal prompts."""
    prompt = row["prompt"]
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return " ".join(" ".join(texts).lower().split())


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add --output, --test-output and --test-share."""
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        action="append",
        metavar="FILE",
        help="file to write, .jsonl or .parquet; may be given several times",
    )
    parser.add_argument(
        "--test-output",
        type=Path,
        action="append",
        metavar="FILE",
        help="file of held-out rows, which --output then lacks; may be given several times",
    )
    parser.add_argument(
        "--test-share",
        type=float,
        metavar="SHARE",
        help="expected share of the prompts in --test-output; a hash of the prompt decides [0.05]",
    )


def write_outputs(rows: list[Row], args: argparse.Namespace, key: Key = prompt_text) -> None:
    """Write --output and --test-output, and print their summaries.

    A row is in the test files if the SHA-256 hash of its ``key`` is below --test-share. Hence rows with one key are
    never in both, in any order of the rows, with any other rows, and in any run of the tool with the same share.
    """
    share = 0.05 if args.test_share is None else args.test_share
    if args.test_output is None:
        if args.test_share is not None:
            raise GrpoError(
                f"--test-share {share:g} has no effect without --test-output: give the file of held-out rows"
            )
        files = [(path, rows) for path in args.output]
    else:
        if not 0 < share < 1:
            raise GrpoError(f"--test-share {share:g} must be between 0 and 1")
        held_out = [hash_share(key(row)) < share for row in rows]
        train = [row for row, out in zip(rows, held_out, strict=True) if not out]
        test = [row for row, out in zip(rows, held_out, strict=True) if out]
        if not train or not test:
            which, change = ("test", "larger") if train else ("training", "smaller")
            raise GrpoError(
                f"--test-share {share:g} of {len(rows):,} rows leaves the {which} file empty: "
                f"give a {change} share, or more rows"
            )
        files = [(path, train) for path in args.output] + [(path, test) for path in args.test_output]
    paths = [path.resolve() for path, _ in files]
    twice = [str(path) for path in paths if paths.count(path) > 1]
    if twice:
        raise GrpoError(f"{twice[0]} occurs twice in --output and --test-output: give each file once")
    for path, part in files:
        write_rows(part, path)
        print_summary(part, path)


def hash_share(text: str) -> float:
    """Return a number in [0, 1) from the SHA-256 hash of a text: even over different texts, equal for equal ones."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48


def convert_files(
    doc: str,
    convert: Convert,
    parser: argparse.ArgumentParser,
    argv: list[str] | None = None,
    key: Key = prompt_text,
    read: Callable[[Path], Originals] | None = None,
    keep: Callable[[Row], bool] = lambda row: True,
    check: Callable[[argparse.Namespace], None] = lambda args: None,
) -> int:
    """Run the command line of a tool: convert the rows of --input, write every output, return the exit code.

    ``convert(row, args)`` raises GrpoError with the expected format for a bad row. ``parser`` may already have flags of
    the tool. ``key`` is that of `write_outputs`. ``read`` yields the rows of a path [`read_originals`]. ``keep(row)``
    returns whether a converted row is written, and raises GrpoError for a bad one. ``check(args)`` raises GrpoError for
    flags that contradict each other.
    """
    parser.description, parser.formatter_class = doc, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--input",
        type=Path,
        required=True,
        action="append",
        metavar="PATH",
        help="original file, or folder of .json files; may be given several times",
    )
    add_output_flags(parser)
    parser.add_argument(
        "--bad-rows",
        choices=("raise", "skip"),
        default="raise",
        help="bad rows: end with an error, or skip them [raise]",
    )
    args = parser.parse_args(argv)
    rows, bad, number = [], [], 0
    try:
        check(args)
        originals = (item for path in args.input for item in (read or read_originals)(path))
        shown = tqdm(originals, "converting", delay=1, disable=not sys.stderr.isatty())
        for where, row in shown:
            number += 1
            try:
                converted = convert(row(), args)
                if keep(converted):
                    rows.append(converted)
            except GrpoError as error:
                bad.append(f"{where}: {error}")
        lines = list(without_repeats(bad))
        for line in lines[:_MAX_REPORTED]:
            print(line, file=sys.stderr)
        if len(lines) > _MAX_REPORTED:
            print(f"{len(bad):,} bad rows in all", file=sys.stderr)
        if bad and args.bad_rows == "raise":
            return 1
        if not number:
            raise GrpoError(f"{', '.join(map(str, args.input))}: no rows")
        write_outputs(rows, args, key)
        if bad:
            print(f"left out {len(bad):,} of {number:,} rows")
    except GrpoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def without_repeats(bad: Iterable[str]) -> Iterator[str]:
    """Yield the lines "PLACE: ERROR" of bad rows; of an error that many rows have, the first lines and the number.

    Errors that differ in numbers only are the same.
    """
    counts: Counter[str] = Counter()
    for line in bad:
        error = re.sub(r"\d+", "N", line.partition(": ")[2])
        counts[error] += 1
        if counts[error] <= _SAME:
            yield line
    for error, count in counts.items():
        if count > _SAME:
            yield f"{count - _SAME:,} more rows: {error}"


def read_originals(path: Path) -> Originals:
    """Yield (place, function that reads the row) for the rows of ``path``.

    ``path`` is a file of JSON lines or Parquet, a .json file with one list, or a folder of .json files with one object
    each. The function raises GrpoError for an invalid row.
    """
    if path.is_dir():
        files = sorted(path.rglob("*.json"))
        if not files:
            raise GrpoError(f"{path}: the folder has no .json files")
        yield from ((str(file), partial(_read_object, file)) for file in files)
    elif path.suffix == ".json" and path.is_file() and _starts_with(path) == b"[":
        try:
            entries = _parse_json(path)
        except GrpoError as error:
            raise GrpoError(f"{path}: {error}") from error
        yield from ((f"{path}, entry {number}", partial(_as_object, row)) for number, row in enumerate(entries, 1))
    else:
        rows = RowFiles([path], BLOCK_BYTES)
        for number in range(len(rows)):
            file, block, index, where = rows.find(number)
            yield where, partial(file.row, block, index)


def _starts_with(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]


def _parse_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise GrpoError(f"not valid JSON ({error})") from error


def _read_object(path: Path) -> dict[str, Any]:
    return _as_object(_parse_json(path))


def _as_object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise GrpoError(f"expected an object, found {json.dumps(row)[:60]}")
    return row


def text(row: dict[str, Any], *keys: str) -> str:
    """Return the first of these columns that is present; raise GrpoError unless it is a non-empty string."""
    key = next((key for key in keys if row.get(key) is not None), keys[0])
    if not isinstance(row.get(key), str) or not row[key].strip():
        found = json.dumps(row.get(key), default=str)[:100]
        raise GrpoError(f'expected a text in "{key}", found {found}')
    return row[key].strip()


def chat(question: str, instruction: str) -> list[dict[str, str]]:
    """Return a question as chat messages, followed by the instruction about the format of the answer."""
    return [{"role": "user", "content": f"{question}\n\n{instruction}" if instruction else question}]


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows as JSON lines (.jsonl) or Parquet (.parquet), atomically: never a partial file."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise GrpoError(f"{path}: the name must end in .jsonl or .parquet")
    if not rows:
        raise GrpoError(f"{path}: there are no rows to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            if path.suffix == ".jsonl":
                text = "".join(json.dumps(row, ensure_ascii=False, default=_as_json) + "\n" for row in rows)
                unfinished.write_text(text, encoding="utf-8")
            else:
                columns = dict.fromkeys(
                    name for row in rows for name in row
                )  # from_pylist takes the columns of the first row only
                table = pyarrow.table({name: _array(name, [row.get(name) for row in rows]) for name in columns})
                pyarrow.parquet.write_table(table, unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except (GrpoError, pyarrow.ArrowException) as error:
        raise GrpoError(f"{path}: {error}") from error
    except OSError as error:
        raise GrpoError(f"{path}: cannot be written: {error}") from error


def _array(name: str, values: list[Any]) -> pyarrow.Array:
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise GrpoError(f'Parquet needs one type in all rows of "{name}", unlike .jsonl: {error}') from error


def _as_json(value: Any) -> str:
    """Return the text of a Parquet value that JSON lacks, such as a date; raise GrpoError for bytes."""
    if isinstance(value, bytes):
        raise GrpoError(f"a column has bytes ({value[:8]!r}...), which .jsonl cannot have: give --output a .parquet")
    return str(value)


def print_summary(rows: list[dict[str, Any]], path: Path) -> None:
    """Print the number of rows of a file, the lengths of the prompts, and the first row."""
    prompts = [row["prompt"] for row in rows]
    lengths = [len(p) if isinstance(p, str) else sum(len(message["content"]) for message in p) for p in prompts]
    low, middle, high = min(lengths), statistics.median(lengths), max(lengths)
    print(
        f"{path}: {len(rows)} rows with {', '.join(rows[0])}; prompts of {low} to {high} characters, median {middle:g}"
    )
    shown = {name: value for name, value in rows[0].items() if name != "images"}
    print("the first: " + json.dumps(shown, ensure_ascii=False, default=str))
