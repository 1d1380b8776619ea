"""Flags and rules of prompts, tokenizers and micro-batches."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.data.blend import check_row_file, read_blend
from megatron_grpo.data.held_out_files import valid_paths
from megatron_grpo.parallel.zigzag import padded_lengths
from megatron_grpo.utils.batch_sizes import longest_in_words, longest_sequence
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flags import COUNT, PATH, POSITIVE, SHARE, TEXT, FlagRow
from megatron_grpo.utils.rules import excludes, flag, needs, required

TOKENIZERS = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer")

DATA: tuple[FlagRow, ...] = (
    (
        "--train-data-path",
        [PATH],
        None,
        "JSON-lines or Parquet files of training prompts, or saved data sets; with weights, one weight before each",
    ),
    (
        "--valid-data-path",
        [PATH],
        None,
        "files of held-out prompts, as for --train-data-path; several have metrics of their own, named after the file "
        "or by NAME=PATH",
    ),
    ("--prompt-key", str, "prompt", 'column of the prompt, a string or chat messages; "messages" if it is absent'),
    ("--system-prompt", TEXT, None, "system message that precedes every prompt; an empty one is none"),
    ("--chat-template", str, None, "Jinja chat template, a file or the text itself [the tokenizer's]"),
    (
        "--chat-template-kwargs",
        dict,
        None,
        'variables of the chat template, such as {"enable_thinking": false}; a row can set its own',
    ),
    ("--max-prompt-length", COUNT, 512, "maximum length of a prompt, tokens"),
    (
        "--truncation-strategy",
        ("raise", "left", "delete"),
        "raise",
        "prompts above --max-prompt-length: raise an error, cut on the left, or skip the row",
    ),
    ("--bad-rows", ("raise", "skip"), "raise", "invalid rows: report them and end, or skip them"),
    ("--no-shuffle", bool, False, "use the prompts in the order of the files"),
    ("--tokenizer-type", TOKENIZERS, TOKENIZERS[0], "kind of tokenizer"),
    ("--tokenizer-model", PATH, None, "directory or file of the tokenizer [--load-hf]"),
    ("--trust-remote-code", bool, False, "run the Python code in the tokenizer's directory (Kimi-K2, Moonlight)"),
    (
        "--tiktoken-pattern",
        ("v1", "v2"),
        "v2",
        "Megatron-LM's name of the pattern that splits text into words (TikTokenizer)",
    ),
    (
        "--tiktoken-num-special-tokens",
        COUNT,
        1000,
        "number of ids before the vocabulary, for special tokens (TikTokenizer)",
    ),
    (
        "--tiktoken-special-tokens",
        [str],
        None,
        "names of the first special tokens (TikTokenizer) [Megatron-LM's seven]",
    ),
)

SFT: tuple[FlagRow, ...] = (
    ("--sft-iters", COUNT, None, "number of supervised updates before the first rollout"),
    (
        "--sft-data-path",
        [PATH],
        None,
        "files of demonstrations, as for --train-data-path: messages, or a prompt and its answer",
    ),
    ("--sft-lr", POSITIVE, None, "learning rate of these updates, constant after the run's warm-up"),
)

CURRICULUM: tuple[FlagRow, ...] = (
    ("--curriculum", bool, False, "order the prompts of each epoch from easy to hard, by the column pass_rate"),
    ("--min-pass-rate", SHARE, None, "skip training prompts with a lower pass_rate [keep all]"),
    ("--max-pass-rate", SHARE, None, "skip training prompts with a higher pass_rate [keep all]"),
)


def check_data(args: Namespace) -> None:
    """Refuse contradictory flags of prompts and tokenizers."""
    paths, weights = read_blend(args.train_data_path or [])
    if weights and args.num_epochs is not None:
        raise GrpoError(
            "--num-epochs and weights in --train-data-path cannot both be given: with weights each file has epochs of "
            "another length; give --train-iters"
        )
    if read_blend(args.valid_data_path or [])[1]:
        raise GrpoError("--valid-data-path has weights, but every held-out prompt counts the same: leave them out")
    for path in [*paths, *valid_paths(args.valid_data_path)]:
        check_row_file(path)
    for dest in ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens"):
        if dest in args.explicit and args.tokenizer_type != "TikTokenizer":
            raise GrpoError(f"{flag(dest)} needs --tokenizer-type TikTokenizer")
    for dest in ("chat_template", "chat_template_kwargs", "trust_remote_code"):
        if getattr(args, dest) and args.tokenizer_type != "HuggingFaceTokenizer":
            raise GrpoError(f"{flag(dest)} needs --tokenizer-type HuggingFaceTokenizer")


def check_sft(args: Namespace) -> None:
    """Refuse a supervised warm-up without data or learning rate, or before recorded rollouts."""
    needs(args, "sft_lr", "sft_iters", "it is of the supervised updates")
    if not args.sft_loss_type:
        needs(args, "sft_data_path", "sft_iters", "it is of the supervised updates (or give --sft-loss-type)")
    for dest in ("sft_data_path", "sft_lr"):
        if args.sft_iters and not args.dry_run:
            required(args, dest, "--sft-iters needs it")
    for dest, reason in {
        "eval_only": "an evaluation makes no updates",
        "rollout_only": "the engine would sample with other weights than a run without the warm-up",
        "train_only": "the recorded completions are of a policy after its warm-up: start from its weights",
        "replay_rollouts": "the recorded completions are of a policy after its warm-up: start from its weights",
    }.items():
        excludes(args, "sft_iters", dest, reason)
    for path in read_blend(args.sft_data_path or [])[0]:
        check_row_file(path)


def resolve_chat_template(args: Namespace) -> dict[str, Any]:
    """Return the text of --chat-template."""
    return {"chat_template": read_chat_template(args.chat_template)} if args.chat_template else {}


def resolve_system_prompt(args: Namespace) -> dict[str, Any]:
    """Return --system-prompt; None for an empty one, which takes back that of a launch script. Refuse a file's name."""
    text = args.system_prompt or None
    if text and re.fullmatch(r"\S+\.(txt|md|jinja|json)", text):
        raise GrpoError(
            f'--system-prompt {text} names a file, but the flag is the text: --system-prompt "$(cat {text})"'
        )
    return {"system_prompt": text}


def resolve_tokenizer(args: Namespace) -> dict[str, Any]:
    """Return --tokenizer-model, by default that of --load-hf."""
    return {"tokenizer_model": args.load_hf} if args.tokenizer_model is None else {}


def check_tokenizer(args: Namespace) -> None:
    """Refuse a run without a tokenizer."""
    if not args.dry_run:
        required(args, "tokenizer_model", "give the tokenizer's directory or file, or --load-hf")


def read_chat_template(given: str) -> str:
    """Return the text of --chat-template: the content of a file, or the value itself if it is a template."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise GrpoError(
            f"--chat-template {given}: neither a template, which has {{{{ or {{%, nor a file that can be read ({error})"
        ) from error


def check_pass_rates(args: Namespace) -> None:
    """Refuse a range of pass rates that excludes every prompt."""
    low, high = args.min_pass_rate, args.max_pass_rate
    if low is not None and high is not None and low > high:
        raise GrpoError(f"--min-pass-rate ({low}) must be at most --max-pass-rate ({high}): no prompt would be left")


def smallest_budget(args: Namespace) -> int:
    """Return the smallest --max-tokens-per-microbatch that takes the longest possible sequence."""
    longest, samples = np.array([longest_sequence(args)]), np.array([_most_samples(args)])
    padded = int(padded_lengths(longest, args.context_parallel_size, samples)[0])
    return -(-padded // args.context_parallel_size) if args.hybrid_context_parallel else padded


def _most_samples(args: Namespace) -> int:
    """Return the largest number of samples of a trajectory."""
    if args.agent:
        return args.max_completion_length  # each has a token of the policy
    return args.max_turns if args.on_rewritten_history == "split" else 1


def check_budgets(args: Namespace) -> None:
    """Refuse a token budget that is smaller than the longest possible sequence."""
    least, cp_size = smallest_budget(args), args.context_parallel_size
    for dest in ("max_tokens_per_microbatch", "logprobs_max_tokens_per_microbatch"):
        budget = getattr(args, dest)
        if budget is not None and least > budget:
            shares = " and divided by it" if args.hybrid_context_parallel else ""
            several = f" in up to {_most_samples(args)} samples" if _most_samples(args) > 1 else ""
            raise GrpoError(
                f"{longest_in_words(args)}{several} are {least} tokens, padded for --context-parallel-size "
                f"{cp_size}{shares}: {flag(dest)} ({budget}) must be at least {least}"
            )
