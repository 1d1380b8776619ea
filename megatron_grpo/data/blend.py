"""The words of --train-data-path and --valid-data-path: weights, files, and data sets in the cache."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.data.saved_datasets import PREFIX
from megatron_grpo.utils.errors import GrpoError

ROW_FILES = (".jsonl", ".json", ".parquet", ".arrow")
TABLES = (".csv", ".tsv")  # tools/data/own_rows.py converts them


def read_blend(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Split the words of --train-data-path into paths and weights; the weights are None if there are none.

    Raises GrpoError unless all paths follow a weight or none does.
    """
    numbers = [_parse_number(word) for word in words]
    if all(number is None for number in numbers):
        return list(words), None
    if len(words) % 2 or None in numbers[::2] or any(number is not None for number in numbers[1::2]):
        raise GrpoError(
            f"--train-data-path {' '.join(words)}: give a weight before each file (0.7 a.parquet 0.3 b.jsonl), or no "
            "weights"
        )
    weights = [number for number in numbers[::2] if number is not None]
    if not all(0 < weight < math.inf for weight in weights):
        raise GrpoError(
            f"--train-data-path {' '.join(words)}: weights must be finite and greater than 0; leave out a file with "
            "weight 0"
        )
    return list(words[1::2]), weights


def _parse_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def check_row_file(path: str | Path) -> None:
    """Raise GrpoError for a file of prompts whose suffix is not one of `ROW_FILES`.

    Directories and datasets of the cache may have any name.
    """
    suffix = Path(path).suffix
    if suffix in ROW_FILES or str(path).startswith(PREFIX) or Path(path).is_dir():
        return
    if suffix.lower() in TABLES:
        output = Path(path).with_suffix(".parquet")
        raise GrpoError(
            f"{path}: a run reads no {suffix}: python tools/data/own_rows.py --input {shlex.quote(str(path))} "
            f"--prompt-column NAME --answer-column NAME --output {shlex.quote(str(output))} makes a file of prompts"
        )
    if Path(path).exists():
        raise GrpoError(f"{path}: prompts are read from .jsonl, .parquet or .arrow files, not from {suffix or 'this'}")


def absent_files(words: Sequence[str]) -> list[str]:
    """Return the files and directories of a blend that this machine does not have; the cache is not searched."""
    return [path for path in read_blend(words)[0] if not (path.startswith(PREFIX) or Path(path).exists())]
