"""Tokens that end a completion: the model's ends of turn, --stop-token-ids, and stop words that are special tokens."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.json_files import read_json_object

if TYPE_CHECKING:  # it imports torch, which the data tools do not need
    from megatron_grpo.data.tokenizer import Tokenizer

# Files of a model directory with eos_token_id. Instruct models have several: Gemma's turns end with <end_of_turn>, and
# Llama 3's with <|eot_id|> or <|eom_id|>, where the tokenizer's end of sequence may be another token.
_FILES = ("generation_config.json", "config.json")


def end_token_ids(args: argparse.Namespace, tokenizer: "Tokenizer") -> tuple[int, ...]:
    """Return the ids of the tokens that end a completion: `turn_end_token_ids`, with --ignore-eos only given ones."""
    return _end_token_ids(args, tokenizer, not args.ignore_eos)


def turn_end_token_ids(args: argparse.Namespace, tokenizer: "Tokenizer") -> tuple[int, ...]:
    """Return the ids of the tokens that end a turn, the tokenizer's end of sequence first.

    The others come from ``eos_token_id`` in generation_config.json and config.json of --tokenizer-model and --load-hf,
    from --stop-token-ids, and from --stop-words that are special tokens. GrpoError for an id outside the vocabulary.
    """
    return _end_token_ids(args, tokenizer, True)


def _end_token_ids(args: argparse.Namespace, tokenizer: "Tokenizer", of_model: bool) -> tuple[int, ...]:
    given = {"--stop-token-ids": args.stop_token_ids or []}
    given["--stop-words"] = special_stop_words(args.stop_words or (), tokenizer.special_tokens)
    if of_model:
        given["the tokenizer"] = [tokenizer.eos_id]
        for directory in dict.fromkeys(str(d) for d in (args.tokenizer_model, args.load_hf) if d):
            for name in _FILES:
                path = Path(directory) / name
                if path.is_file():
                    given[str(path)] = _eos_token_ids(path)
    for source, ids in given.items():
        for token in ids:
            if not 0 <= token < tokenizer.vocab_size:
                raise GrpoError(
                    f"{source}: the end token {token} is not in the tokenizer's vocabulary of {tokenizer.vocab_size}; "
                    "correct it, or give the tokenizer of the model (--tokenizer-model)"
                )
    first = given.pop("the tokenizer", [])
    return tuple(dict.fromkeys([*first, *(token for ids in given.values() for token in ids)]))


def _eos_token_ids(path: Path) -> list[int]:
    """Return eos_token_id of a file as a list; empty without one. Multimodal models have it in their text_config."""
    config: dict[str, Any] = read_json_object(path)
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), dict):
        value = config["text_config"].get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise GrpoError(f"{path}: eos_token_id is {value!r:.200}; expected a whole number or a list of them")
    return ids


def special_stop_words(words: Iterable[str], special_tokens: Mapping[str, int]) -> list[int]:
    """Return the ids of the stop words that are special tokens; the text that an engine searches omits those."""
    return [special_tokens[word] for word in words if word in special_tokens]


def describe(ids: Iterable[int], tokenizer: "Tokenizer") -> str:
    """Return the end tokens for the banner, such as ``<|im_end|> (151645)``; "the maximum length only" without any."""
    named = [f"{tokenizer.decode([token], skip_special_tokens=False)} ({token})" for token in ids]
    return ", ".join(named) or "the maximum length only"
