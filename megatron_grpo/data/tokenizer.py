"""Tokenizers: a Hugging Face directory, a SentencePiece model or a tiktoken vocabulary, always from local disk."""

import argparse
import base64
import binascii
import json
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer

from megatron_grpo.utils.errors import GrpoError

# Any of these makes a directory a tokenizer; without one transformers would build an empty tokenizer and not complain.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")


class Tokenizer(Protocol):
    """What the trainer asks of a tokenizer; ids are Python ints in [0, vocab_size)."""

    vocab_size: int
    eos_id: int
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text that is to be continued, with the special tokens the tokenizer itself puts first (BOS)."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; end-of-sequence and the like are left out unless asked for."""

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """The ids of a conversation up to where the assistant's answer begins."""


class HuggingFaceTokenizer:
    """A tokenizer directory as transformers reads it, offline and without running code that it brings."""

    def __init__(self, path: str | Path):
        self.directory = Path(path)
        if not self.directory.is_dir():
            raise GrpoError(
                f"--tokenizer-model {path}: no such directory. HuggingFaceTokenizer reads a local directory; "
                "fetch a model from the hub first (hf download NAME --local-dir DIR)"
            )
        if not any(any(self.directory.glob(pattern)) for pattern in _VOCABULARY_FILES):
            raise GrpoError(f"--tokenizer-model {path}: the directory has none of {', '.join(_VOCABULARY_FILES)}")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        # The reader in Rust raises plain Exception for a damaged file.
        except Exception as error:
            raise GrpoError(f"--tokenizer-model {path}: transformers cannot read this tokenizer: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise GrpoError(f"--tokenizer-model {path}: no eos_token; name one in tokenizer_config.json")
        self.eos_id: int = self._tokenizer.eos_token_id
        self.pad_id: int = self.eos_id if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id
        # The largest id and not the number of entries: ids may have gaps.
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        if self.encode("1")[-1:] == [self.eos_id]:
            raise GrpoError(
                f"--tokenizer-model {path}: it ends every text with its end-of-sequence token, so no prompt could be "
                "continued; set add_eos_token to false in tokenizer_config.json"
            )

    @staticmethod
    def is_in(directory: str | Path) -> bool:
        """Whether a directory holds a tokenizer."""
        return any(any(Path(directory).glob(name)) for name in _VOCABULARY_FILES)

    def vocabulary(self) -> dict[str, int]:
        """Token -> id."""
        return self._tokenizer.get_vocab()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        if not self._tokenizer.chat_template:
            raise GrpoError(
                f"chat messages need a chat template and the tokenizer in {self.directory} has none; "
                "give the prompts as plain strings or add a chat_template.jinja"
            )
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        # A template is a program: on what it does not expect it fails as programs do.
        except Exception as error:
            raise GrpoError(f"the chat template in {self.directory} refuses these messages: {error}") from error


class SentencePieceTokenizer:
    """A SentencePiece .model file; as in Megatron-LM no BOS is put before a text, and there is no chat template."""

    def __init__(self, path: str | Path):
        from sentencepiece import SentencePieceProcessor  # only those who use it need it

        self.file = Path(path)
        if not self.file.is_file():
            raise GrpoError(
                f"--tokenizer-model {path}: no such file. SentencePieceTokenizer reads a .model file; "
                "for a directory use --tokenizer-type HuggingFaceTokenizer"
            )
        try:
            self._tokenizer = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise GrpoError(f"--tokenizer-model {path}: not a SentencePiece model: {error}") from error
        self.vocab_size: int = self._tokenizer.get_piece_size()
        self.eos_id: int = self._tokenizer.eos_id()
        if self.eos_id < 0:
            raise GrpoError(
                f"--tokenizer-model {path}: the model was trained without an end-of-sequence piece (eos_id)"
            )
        self.pad_id: int = self._tokenizer.pad_id() if self._tokenizer.pad_id() >= 0 else self.eos_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids)  # control pieces have no text, wanted or not

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        raise GrpoError(
            "chat messages need a chat template and a SentencePiece model has none; give the prompts as plain strings "
            "(and no --system-prompt), or use --tokenizer-type HuggingFaceTokenizer"
        )


class TikTokenizer:
    """A byte-pair vocabulary in Megatron-LM's JSON form, with its ids: special tokens, then their number + rank.

    megatron-core's own reader makes the encoding, with its patterns v1 and v2. As there, no BOS is put before a text,
    and special tokens in a text count as such. ``vocab_size`` (None: no limit) cuts the vocabulary off behind. There is
    no chat template.
    """

    def __init__(
        self,
        path: str | Path,
        pattern: str = "v2",
        num_special_tokens: int = 1000,
        special_tokens: list[str] | None = None,
        vocab_size: int | None = None,
    ):
        from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer as core  # only those who use it need it

        special = list(special_tokens or core.SPECIAL_TOKENS)
        missing = [token for token in core.SPECIAL_TOKENS if token not in special]
        if missing or len(set(special)) < len(special):
            raise GrpoError(
                f"--tiktoken-special-tokens {' '.join(special)}: each once, with {' '.join(core.SPECIAL_TOKENS)} "
                "among them"
            )
        if len(special) > num_special_tokens:
            raise GrpoError(
                f"--tiktoken-num-special-tokens ({num_special_tokens}) must be at least {len(special)}, the number of "
                "--tiktoken-special-tokens"
            )
        count = _check_tiktoken(Path(path))
        if vocab_size is not None:
            count = min(count, vocab_size - num_special_tokens)
        if count < 256:
            raise GrpoError(
                f"--vocab-size ({vocab_size}) leaves no room for the 256 bytes behind --tiktoken-num-special-tokens "
                f"({num_special_tokens}): correct one of them"
            )
        self.vocab_size = num_special_tokens + count
        reader = core.TikTokenTokenizer(str(path), special, num_special_tokens, None, pattern, self.vocab_size)
        self._encoding, self._specials = reader.tokenizer, num_special_tokens
        self.eos_id: int = reader.eos_id
        self.pad_id: int = reader.pad_id

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._encoding.decode([i for i in ids if i >= self._specials or not skip_special_tokens])

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        raise GrpoError(
            "chat messages need a chat template and a tiktoken vocabulary has none; give the prompts as plain strings "
            "(and no --system-prompt), or use --tokenizer-type HuggingFaceTokenizer"
        )


def _check_tiktoken(path: Path) -> int:
    """The number of tokens in a vocabulary of Megatron-LM's JSON form; GrpoError that says what is wrong with it."""
    form = 'a list of {"rank": 0, "token_bytes": BASE64, "token_str": ..}, rank by rank, the 256 bytes first'
    if not path.is_file() or path.suffix != ".json":
        raise GrpoError(
            f"--tokenizer-model {path}: TikTokenizer reads Megatron-LM's vocabulary file, .json with {form}; a "
            ".tiktoken file or a directory with a tokenizer.json is for --tokenizer-type HuggingFaceTokenizer"
        )
    try:
        tokens = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise GrpoError(f"--tokenizer-model {path}: cannot be read as JSON: {error}") from error
    seen: set[bytes] = set()
    for rank, token in enumerate(tokens if isinstance(tokens, list) else [tokens]):
        try:
            text = base64.b64decode(token["token_bytes"], validate=True)
            good = token.keys() == {"rank", "token_bytes", "token_str"} and token["rank"] == rank and text not in seen
        except (TypeError, KeyError, ValueError, AttributeError, binascii.Error):
            good = False
        if not good or (rank < 256 and text != bytes([rank])):
            raise GrpoError(f"--tokenizer-model {path}: entry {rank} is {json.dumps(token):.200}; expected {form}")
        seen.add(text)
    if len(seen) < 256:
        raise GrpoError(f"--tokenizer-model {path}: has {len(seen)} tokens; expected {form}")
    return len(seen)


def build_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer of --tokenizer-type at --tokenizer-model."""
    match args.tokenizer_type:
        case "HuggingFaceTokenizer":
            return HuggingFaceTokenizer(args.tokenizer_model)
        case "SentencePieceTokenizer":
            return SentencePieceTokenizer(args.tokenizer_model)
        case "TikTokenizer":
            return TikTokenizer(
                args.tokenizer_model,
                args.tiktoken_pattern,
                args.tiktoken_num_special_tokens,
                args.tiktoken_special_tokens,
                args.vocab_size,
            )
    raise GrpoError(f"--tokenizer-type {args.tokenizer_type} is not supported")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a tokenizer that can produce ids for which the model, of vocab_size entries, has no embedding."""
    if tokenizer.vocab_size > vocab_size:
        raise GrpoError(
            f"the tokenizer has {tokenizer.vocab_size} entries but the model's vocabulary holds {vocab_size}; "
            "give the tokenizer that belongs to the model (--tokenizer-model) or raise --vocab-size"
        )
