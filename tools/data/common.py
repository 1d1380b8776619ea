"""What the data tools share: writing rows to a file of prompts, and saying what was written."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_grpo.errors import GrpoError


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows as JSON lines (.jsonl) or Parquet (.parquet); the file is there whole or not at all."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise GrpoError(f"{path}: the name must end in .jsonl or .parquet")
    if not rows:
        raise GrpoError(f"{path}: there are no rows to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            if path.suffix == ".jsonl":
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                partial.write_text(text, encoding="utf-8")
            else:
                columns = dict.fromkeys(name for row in rows for name in row)  # from_pylist looks at the first row only
                table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
                pyarrow.parquet.write_table(table, partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except pyarrow.ArrowException as error:
        raise GrpoError(f"{path}: a Parquet column needs one type in all rows: {error}") from error
    except OSError as error:
        raise GrpoError(f"{path}: cannot be written: {error}") from error


def print_summary(rows: list[dict[str, Any]], path: Path) -> None:
    """Prints how many rows a file got, and the first one."""
    print(f"{path}: {len(rows)} rows with {', '.join(rows[0])}; the first:")
    print("  " + json.dumps(rows[0], ensure_ascii=False))
