"""Convert DeepScaleR's original file to prompt files for GRPO.

    python tools/data/deepscaler.py --input deepscaler.json --output deepscaler.parquet --bad-rows skip

The input is a JSON list (or JSON lines, or Parquet) of {"problem": .., "answer": .., "solution": ..}. Rows of the
output have "prompt" (chat messages that end with --instruction), "answer" and "data_source". Train on them with
--reward-funcs accuracy. A row is bad if this reward does not accept the row's own answer.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.data.common import chat, text
from tools.data.math_problems import answer_of, check, convert_problems


def convert(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Convert a row of DeepScaleR to a prompt row; raise GrpoError for a missing column or an unreadable answer."""
    result = {"prompt": chat(text(row, "problem"), args.instruction), "answer": answer_of(row)}
    check(result)
    return result | {"data_source": "deepscaler"}


def main(argv: list[str] | None = None) -> int:
    return convert_problems(__doc__, convert, argv)


if __name__ == "__main__":
    sys.exit(main())
