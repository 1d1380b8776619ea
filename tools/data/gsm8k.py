"""Convert the original GSM8K files to prompt files for GRPO.

    python tools/data/gsm8k.py --input train.jsonl --output gsm8k_train.parquet --output gsm8k_train.jsonl

The input has one {"question": ..., "answer": "... #### 72"} per line. Rows of the output have "prompt" (chat messages,
or with --prompt-style plain "Question: ...\\nAnswer:"), "answer" (the number after ####, without commas) and
"data_source". Train on them with --reward-funcs gsm8k (last number of the completion) or accuracy (<answer> text or
\\boxed{}). --examples puts the messages of a JSON file before each question, such as conversations that show how to
call a tool (examples/grpo/calculator_examples.json).
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_grpo.rewards.builtin.short_answer import gsm8k
from megatron_grpo.rewards.registry import Sample
from megatron_grpo.utils.errors import GrpoError
from tools.data.common import chat, convert_files, text

_FINAL = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*\Z")


def convert(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Convert a GSM8K row to a prompt row; raise GrpoError without question, answer or the final "#### number"."""
    question, solution = text(row, "question"), text(row, "answer")
    final = _FINAL.search(solution)
    if final is None:
        raise GrpoError(f'"answer" must end with "#### NUMBER", found {solution[-60:]!r}')
    prompt: list[dict[str, Any]] | str = f"Question: {question}\nAnswer:"
    if args.prompt_style == "chat":
        prompt = [*args.examples, *chat(question, "")]
    result = {"prompt": prompt, "answer": final[1].replace(",", ""), "data_source": "gsm8k"}
    if gsm8k(Sample("", solution, result)) != 1:
        raise GrpoError(f"the reward gsm8k does not accept the row's own solution: {solution[-60:]!r}")
    return result


def messages(path: str) -> list[dict[str, Any]]:
    """Return the chat messages of a JSON file, for argparse."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error
    if not isinstance(found, list) or not all(isinstance(one, dict) and "role" in one for one in found):
        raise argparse.ArgumentTypeError(f"{path}: must be a list of messages, each with a role")
    return found


def check(args: argparse.Namespace) -> None:
    """Raise GrpoError where --examples cannot stand before the questions."""
    if args.examples and args.prompt_style == "plain":
        raise GrpoError("--examples with --prompt-style plain: examples are chat messages; leave one of them out")
    if args.examples and any(path.suffix == ".parquet" for path in args.output):
        raise GrpoError("--examples: give --output as .jsonl; Parquet gives every message the keys of all messages")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--prompt-style",
        choices=("chat", "plain"),
        default="chat",
        help="format of prompts; plain for a base model [chat]",
    )
    help_text = "JSON file with a list of chat messages that stand before each question [none]"
    parser.add_argument("--examples", type=messages, default=[], metavar="FILE", help=help_text)
    return convert_files(__doc__, convert, parser, argv, check=check)


if __name__ == "__main__":
    sys.exit(main())
