"""Turn the original GSM8K files into prompt files for GRPO.

    python tools/data/gsm8k.py --input train.jsonl --output gsm8k_train.parquet --output gsm8k_train.jsonl

The input has one {"question": ..., "answer": "... #### 72"} a line. Rows of the output: "prompt" (chat messages, or
with --prompt-style plain "Question: ...\\nAnswer:"), "answer" (the number after ####, without commas), "data_source".
Train on them with --reward-funcs gsm8k (last number of the completion) or accuracy (<answer> text or \\boxed{}).
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_grpo.data.row_files import read_rows
from megatron_grpo.errors import GrpoError
from tools.data.common import print_summary, write_rows

_FINAL = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*\Z")


def convert_row(row: dict[str, Any], prompt_style: str) -> dict[str, Any]:
    """A GSM8K row as a prompt row; GrpoError when question, answer or the final "#### number" is missing."""
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise GrpoError(f'expected a text in "{key}", found {json.dumps(row.get(key))}')
    final = _FINAL.search(row["answer"])
    if final is None:
        raise GrpoError(f'"answer" must end with "#### NUMBER", found {row["answer"][-60:]!r}')
    question = row["question"].strip()
    chat = [{"role": "user", "content": question}]
    prompt = chat if prompt_style == "chat" else f"Question: {question}\nAnswer:"
    return {"prompt": prompt, "answer": final[1].replace(",", ""), "data_source": "gsm8k"}


def convert(path: Path, prompt_style: str) -> list[dict[str, Any]]:
    """All rows of a file; an error names its line."""
    rows = []
    for where, row in read_rows(path):
        try:
            rows.append(convert_row(row, prompt_style))
        except GrpoError as error:
            raise GrpoError(f"{where}: {error}") from error
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", type=Path, required=True, help="train.jsonl or test.jsonl as GSM8K's authors publish it"
    )
    parser.add_argument(
        "--output", type=Path, required=True, action="append", help=".jsonl or .parquet; may be given several times"
    )
    parser.add_argument("--prompt-style", choices=("chat", "plain"), default="chat", help="plain: for a base model")
    args = parser.parse_args(argv)
    try:
        rows = convert(args.input, args.prompt_style)
        for path in args.output:
            write_rows(rows, path)
            print_summary(rows, path)
    except GrpoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
