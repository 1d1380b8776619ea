"""Tokenizers: a Hugging Face directory or a SentencePiece model file, always from local disk."""

import argparse
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError
from transformers import AutoTokenizer

from megatron_grpo.errors import GrpoError

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
        except TemplateError as error:
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


def build_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer of --tokenizer-type at --tokenizer-model."""
    kinds: dict[str, type[HuggingFaceTokenizer] | type[SentencePieceTokenizer]] = {
        "HuggingFaceTokenizer": HuggingFaceTokenizer,
        "SentencePieceTokenizer": SentencePieceTokenizer,
    }
    if args.tokenizer_type not in kinds:
        raise GrpoError(f"--tokenizer-type {args.tokenizer_type} is not supported; choose from {', '.join(kinds)}")
    return kinds[args.tokenizer_type](args.tokenizer_model)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a tokenizer that can produce ids for which the model, of vocab_size entries, has no embedding."""
    if tokenizer.vocab_size > vocab_size:
        raise GrpoError(
            f"the tokenizer has {tokenizer.vocab_size} entries but the model's vocabulary holds {vocab_size}; "
            "give the tokenizer that belongs to the model (--tokenizer-model) or raise --vocab-size"
        )
