"""Check every row of prompt files as training does; print bad rows, the counts and the lengths of prompts.

    python tools/data/check.py --train-data-path a.parquet b.jsonl --tokenizer-model DIR --max-prompt-length 1024

The flags are those of pretrain_grpo.py: --load-hf gives tokenizer and processor of images, --environment the tools of
prompts, and --reward-funcs the built-in rewards whose gold answers every row must have. Without --tokenizer-model and
--load-hf lengths are in bytes, and none is too long unless --max-prompt-length is given. Files may have any size.
Three rows with the same error are printed, and how many more there are. The exit code is 1 if there are bad rows.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.data.arguments import resolve_chat_template, resolve_system_prompt
from megatron_grpo.data.prompts import LeftOut, Prompt, PromptDataset
from megatron_grpo.data.tokenizer import build_tokenizer
from megatron_grpo.environments.registry import tools_of
from megatron_grpo.models.arguments import padded_vocab_size
from megatron_grpo.rewards.registry import gold_check
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.resolve import resolve_origin
from megatron_grpo.utils.arguments import replaced, resolved
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.vision.images import ImageReader
from tools.data.common import Bytes, without_repeats


def bad_rows(data: PromptDataset, counts: dict[str, int], lengths: list[int], examples: list[Prompt]) -> Iterator[str]:
    """Read all rows; yield the bad ones, count those left out, and collect the good ones' lengths and the first."""
    for number in range(len(data)):
        try:
            prompt = data.read(number)
        except LeftOut as left:
            counts[left.reason] += 1
            if left.reason == "bad":
                yield str(left)
            continue
        lengths.append(len(prompt.ids))
        if not examples:
            examples.append(prompt)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flags = parser.parse_known_args(argv)[1]
    counts, unit = {"bad": 0, "long": 0, "rate": 0}, "tokens"
    try:
        args = resolved(parse_args(flags), resolve_system_prompt, resolve_chat_template)
        if not args.train_data_path:
            raise GrpoError("--train-data-path is missing: give the files")
        args = resolve_origin(args, resume=False)
        tokenizer: Any = Bytes()
        if args.tokenizer_model:
            tokenizer = build_tokenizer(args)
        else:
            unit = "bytes"
            if "max_prompt_length" not in args.explicit:  # its default is in tokens
                args = replaced(args, max_prompt_length=sys.maxsize)
        images = None
        if args.vision_config:
            args = replaced(args, padded_vocab_size=padded_vocab_size(args))
            images = ImageReader(args, tokenizer.special_tokens)
        tools = partial(tools_of, default=args.environment)
        check_gold = gold_check(args.reward_funcs or [], vars(args))
        data = PromptDataset(
            args.train_data_path, tokenizer, args, streamed=True, tools=tools, images=images, check_gold=check_gold
        )
        lengths: list[int] = []
        examples: list[Prompt] = []
        for line in without_repeats(bad_rows(data, counts, lengths, examples)):
            print(line, file=sys.stderr)
    except GrpoError as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 1
    bad, long, rate = counts.values()
    print(f"{len(lengths):,} good rows, {bad:,} bad, {long:,} too long, {rate:,} outside the pass rates")
    for example in examples:
        low, middle, high = np.quantile(lengths, [0, 0.5, 1])
        print(f"{unit} of a prompt: {low:.0f} to {high:.0f}, median {middle:.0f}")
        print(f"{example.source}: {json.dumps(example.row, ensure_ascii=False, default=str)[:2000]}")
        if args.tokenizer_model:
            print(f"its prompt: {tokenizer.decode(example.ids, skip_special_tokens=False)[:2000]!r}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
