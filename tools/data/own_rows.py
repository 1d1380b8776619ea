"""Convert a table of your own (CSV, TSV, JSON lines, a JSON list or Parquet) to prompt files for GRPO.

    python tools/data/own_rows.py --input mine.csv --prompt-column question --answer-column result \\
        --output train.parquet --test-output test.parquet

A row of the output has "prompt" (chat messages, or with --prompt-style plain the text as it is), "answer" and all other
columns of the input. An answer is written as text, 72.0 as "72" and a list of one value as this value. Without
--answer-column rows have no answer. Repeated rows are left out. Bad rows are those whose prompt is empty or no text,
whose answer is missing or has several values, or whose prompt has another answer in an earlier row. Cells of .csv may
have quotes around them; cells of .tsv are taken as they are.
"""

import argparse
import codecs
import csv
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_grpo.data.json_column import json_column, kind
from megatron_grpo.rewards.builtin.short_answer import gold_text
from megatron_grpo.rewards.registry import Sample
from megatron_grpo.utils.errors import GrpoError
from tools.data.common import Originals, chat, convert_files, read_originals

SEPARATORS = {".csv": ",", ".tsv": "\t"}
SHEETS = (".xlsx", ".xls", ".ods")
_WHOLE_NUMBER = re.compile(r"(0|-?[1-9][0-9]*)\.0")  # as pandas writes a column of whole numbers with gaps
_QUOTED = re.compile(r'"[^"]*(?:""[^"]*)+"')  # as a CSV writer writes a cell with quotes


class Cells(dict[str, Any]):
    """A row of a .csv or .tsv file: all values are text."""


def convert(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Convert a row; raise GrpoError for a prompt that is no text, and for an answer that is not one value."""
    for flag, column in ("--prompt-column", args.prompt_column), ("--answer-column", args.answer_column):
        if column and column not in row:
            raise GrpoError(f'no column "{column}" ({flag}), found {", ".join(map(str, row)) or "none"}')
    question = row[args.prompt_column]
    if not isinstance(question, str):
        cure = ": chat messages need no conversion, give the run --prompt-key" if _are_messages(question) else ""
        raise GrpoError(f'"{args.prompt_column}" must be a text, found {kind(question)}{cure}')
    if not question.strip():
        raise GrpoError(f'"{args.prompt_column}" is empty')
    prompt: Any = question
    if args.prompt_style == "chat":
        prompt = chat(question.strip(), args.instruction)
    answer = {}
    if args.answer_column:
        value = row[args.answer_column]
        if isinstance(row, Cells) and (number := _WHOLE_NUMBER.fullmatch(value.strip())):
            value = number[1]
        answer = {"answer": _answer(value, args.answer_column)}
    named = (args.prompt_column, args.answer_column, "prompt", "answer")
    return {"prompt": prompt, **answer, **{name: value for name, value in row.items() if name not in named}}


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)


def _answer(value: Any, column: str) -> str:
    if isinstance(value, str) and isinstance(parsed := json_column(value), list) and len(parsed) == 1:
        value = parsed  # a list in CSV; one of two values may be an interval
    if value is None or value == "" or value == [] or value != value:  # NaN, where pandas has no value
        raise GrpoError(f'no answer in "{column}"')
    if isinstance(value, bool):
        raise GrpoError(f'"{column}" is {value}: write the text that the policy should answer, such as yes')
    if isinstance(value, Decimal):
        value = format(value.normalize(), "f")
    if not isinstance(value, str | int | float | list):
        raise GrpoError(
            f'"{column}" must be a text or a number, found {kind(value)}: leave out --answer-column; compare with it '
            "in a reward of your own (docs/rewards.md)"
        )
    return gold_text(Sample("", "", {"answer": value}))


class Seen:
    """The converted rows so far, by hashes: their texts would take as much memory as the rows."""

    def __init__(self) -> None:
        self.answers: dict[bytes, Any] = {}  # by prompt
        self.rows: set[bytes] = set()
        self.repeated = 0

    def is_new(self, row: dict[str, Any]) -> bool:
        """Return whether a row is new; raise GrpoError if its prompt had another answer before."""
        answer = row.get("answer")
        before = self.answers.setdefault(_hashed(row["prompt"]), answer)
        if before != answer:
            raise GrpoError(f"the answer is {answer!r}, and {before!r} in an earlier row with the same prompt")
        hashed = _hashed(row)
        if hashed in self.rows:
            self.repeated += 1
            return False
        self.rows.add(hashed)
        return True


def _hashed(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=16).digest()


def read_table(path: Path) -> Originals:
    """Yield (place, function that reads the row) of a file with separators, or as `read_originals` does."""
    separator = SEPARATORS.get(path.suffix.lower())
    if not path.exists():
        raise GrpoError(f"{path}: no such file")
    if path.suffix.lower() in SHEETS:
        raise GrpoError(f"{path}: a spreadsheet is not read: save its sheet as CSV in UTF-8")
    if separator is None:
        if path.is_file() and path.suffix not in (".jsonl", ".json", ".parquet", ".arrow"):
            raise GrpoError(f"{path}: rows are read from .csv, .tsv, .jsonl, .json, .parquet or .arrow files")
        yield from read_originals(path)
        return
    try:
        yield from _separated(path, separator)
    except UnicodeDecodeError as error:
        raise GrpoError(
            f"{path}: cannot be read as UTF-8: {error}: save it in UTF-8, or convert it: iconv -f {_iconv_flags(path)}"
        ) from error
    except OSError as error:
        raise GrpoError(f"{path}: cannot be read: {error.strerror}") from error


def _iconv_flags(path: Path) -> str:
    """Return iconv's flags for a file: the encoding of its byte-order mark, else what a person must choose."""
    with path.open("rb") as file:
        marked = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "UTF-16 -t UTF-8" if marked else "ENCODING -t UTF-8, with its encoding, such as WINDOWS-1252"


def _separated(path: Path, separator: str) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(
            file,
            delimiter=separator,
            # text/tab-separated-values has no quotes
            quoting=csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL,
            strict=True,
        )
        start = 1
        try:
            _check_header(reader.fieldnames or [], path, separator)
            start = reader.line_num + 1
            for row in reader:
                yield f"{path}:{reader.line_num}", partial(_whole, row, separator)
                start = reader.line_num + 1
        except csv.Error as error:
            raise GrpoError(
                f"{path}: the row that begins in line {start} has a wrong quote ({error}): a cell that begins with a "
                'quote ends with one, and has "" for each quote inside'
            ) from error


def _check_header(names: Sequence[str], path: Path, separator: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise GrpoError(f'{path}: the header has "{name}" more than once: give each column a name of its own')
    if len(names) == 1 and (other := next((mark for mark in ",;\t" if mark in names[0]), None)):
        raise GrpoError(
            f"{path}: the header has {other!r} and no {separator!r}: {path.suffix} has {separator!r} between columns, "
            "and a point in decimals"
        )


def _whole(row: dict[Any, Any], separator: str) -> Cells:
    if None in row or None in row.values():
        raise GrpoError(f"the header has {len(row) - (None in row)} columns, and the line has more or fewer")
    if separator == "\t" and (name := next((name for name in row if _QUOTED.fullmatch(row[name])), None)) is not None:
        raise GrpoError(f'"{name}" is quoted as in CSV, but TSV has no quotes: save the table as .csv')
    return Cells(row)


def _check(args: argparse.Namespace) -> None:
    if args.instruction and args.prompt_style == "plain":
        raise GrpoError("--instruction has no effect with --prompt-style plain: leave it out")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt-column", default="prompt", metavar="NAME", help="column of the prompt [prompt]")
    parser.add_argument("--answer-column", metavar="NAME", help="column of the answer [rows have none]")
    parser.add_argument(
        "--instruction",
        default="",
        metavar="TEXT",
        help="text after each prompt, such as the form of the answer; with chat messages [none]",
    )
    parser.add_argument(
        "--prompt-style",
        choices=("chat", "plain"),
        default="chat",
        help="format of prompts; plain for a base model [chat]",
    )
    seen = Seen()
    code = convert_files(__doc__, convert, parser, argv, read=read_table, keep=seen.is_new, check=_check)
    if seen.repeated:
        print(f"left out {seen.repeated:,} repeated rows")
    return code


if __name__ == "__main__":
    sys.exit(main())
