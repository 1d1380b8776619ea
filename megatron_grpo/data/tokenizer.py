"""Tokenizers of a Hugging Face directory, a SentencePiece model or a tiktoken vocabulary, all from local files."""

import argparse
import base64
import binascii
import datetime
import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.meta
from transformers import AutoTokenizer

from megatron_grpo.data.text_start import encode_once, text_start
from megatron_grpo.utils.errors import GrpoError

# A tokenizer directory has at least one of these; without them transformers builds an empty tokenizer without an error.
_VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken")


class Tokenizer(Protocol):
    """Interface of all tokenizers; ids are Python ints in [0, vocab_size)."""

    vocab_size: int
    eos_id: int
    pad_id: int
    special_tokens: dict[str, int]  # ids by content; `decode` omits them
    longest_token: int  # upper bound of the characters of a token
    text_start: str  # text of the special tokens that `encode` puts before a text (BOS); "" for none

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text to be continued, after the special tokens of ``text_start``, once."""

    def encode_rest(self, text: str) -> list[int]:
        """Return the ids of a text that continues another one: without BOS."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids, without special tokens such as end-of-sequence by default."""

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of a conversation, with the generation prompt of the assistant's answer at the end or without.

        The arguments of tool calls may be objects or JSON text. ``variables`` are further variables of the chat
        template, such as ``{"enable_thinking": False}``.
        """


class ChatTokenizer(Tokenizer, Protocol):
    """Interface of a tokenizer with a chat template, which episodes of several turns need."""

    def render_chat(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Return the text of `apply_chat_template`."""

    def encode_after(self, token: int, text: str) -> list[int]:
        """Return the ids of a text that follows a special token, without that token and without BOS."""


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer directory, read by transformers offline.

    ``chat_template`` replaces the template of the directory. ``trust_remote_code`` runs Python code in the directory.
    Templates that print the date print that of ``now``, by default the time of this call: the clock stands still.
    """

    def __init__(
        self,
        path: str | Path,
        chat_template: str | None = None,
        trust_remote_code: bool = False,
        now: datetime.datetime | None = None,
    ):
        self._now = now or datetime.datetime.now()
        self.directory = Path(path)
        if not self.directory.is_dir():
            raise GrpoError(
                f"--tokenizer-model {path}: no such directory. HuggingFaceTokenizer reads a local directory; "
                "download the model first (hf download NAME --local-dir DIR)"
            )
        if not any(any(self.directory.glob(pattern)) for pattern in _VOCABULARY_FILES):
            raise GrpoError(
                f"--tokenizer-model {path}: the directory has none of {', '.join(_VOCABULARY_FILES)}; copy the model's "
                "there, or give the directory that has them"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code
            )
        # The Rust parser raises plain Exception for a damaged file.
        except Exception as error:
            cure = ""
            if not trust_remote_code and any(self.directory.glob("*.py")):
                cure = "; the directory has a tokenizer in Python: read it, and add --trust-remote-code to run it"
            raise GrpoError(
                f"--tokenizer-model {path}: transformers cannot read this tokenizer: {error}{cure}"
            ) from error
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        if self._tokenizer.eos_token_id is None:
            raise GrpoError(f"--tokenizer-model {path}: no eos_token; set it in tokenizer_config.json")
        self.eos_id: int = self._tokenizer.eos_token_id
        self.pad_id: int = self.eos_id if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id
        added = self._tokenizer.added_tokens_decoder
        self.special_tokens: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        # Not the number of entries, because ids may have gaps.
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size: int = max(vocabulary.values()) + 1
        # The tokenizers of Kimi-K2 and Moonlight reserve two entries more than the models have embeddings.
        while vocabulary.get(f"<|reserved_token_{self.vocab_size - 1}|>") == self.vocab_size - 1:
            self.vocab_size -= 1
        self.longest_token: int = max(map(len, vocabulary))
        self.text_start = text_start(self._tokenizer)
        if self.encode("1")[-1:] == [self.eos_id]:
            raise GrpoError(
                f"--tokenizer-model {path}: the tokenizer ends every text with its end-of-sequence token, so the model "
                "could not continue a prompt; set add_eos_token to false in tokenizer_config.json"
            )

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return bool(self._tokenizer.chat_template)

    @property
    def backend(self) -> Any:
        """The tokenizer of transformers, for vLLM's parsers."""
        return self._tokenizer

    @staticmethod
    def is_in(directory: str | Path) -> bool:
        """Return whether a directory contains a tokenizer."""
        return any(any(Path(directory).glob(name)) for name in _VOCABULARY_FILES)

    def vocabulary(self) -> dict[str, int]:
        """Return {token: id}."""
        return self._tokenizer.get_vocab()

    def encode(self, text: str) -> list[int]:
        return self._known(encode_once(self._tokenizer, text, self.text_start))

    def encode_rest(self, text: str) -> list[int]:
        return self._known(self._tokenizer.encode(text, add_special_tokens=False))

    def _known(self, ids: list[int]) -> list[int]:
        """Return the ids; raise GrpoError for a reserved one, for which the model has no embedding."""
        if max(ids, default=0) >= self.vocab_size:
            raise GrpoError(
                f"the text has {self._tokenizer.convert_ids_to_tokens(max(ids))}, a reserved token of the tokenizer in "
                f"{self.directory}: take it out of the prompt"
            )
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    @cached_property
    def _template_variables(self) -> set[str]:
        """The variables that the chat template reads; raise GrpoError if it is not valid Jinja."""
        # transformers adds this tag, which marks the assistant's tokens and changes no text.
        template = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", self._tokenizer.get_chat_template())
        try:
            syntax = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        except jinja2.TemplateSyntaxError as error:
            raise GrpoError(f"line {error.lineno} of the chat template in {self.directory}: {error}") from error
        return jinja2.meta.find_undeclared_variables(syntax)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        generation_prompt: bool = True,
    ) -> list[int]:
        if not self._tokenizer.chat_template:
            raise GrpoError(
                f"chat messages need a chat template, and the tokenizer in {self.directory} has none; "
                "give the prompts as plain strings (and no --system-prompt), or a template with --chat-template"
            )
        unknown = sorted(variables.keys() - self._template_variables) if variables else []
        if unknown:
            raise GrpoError(
                f"the chat template has no variable {', '.join(unknown)}: correct --chat-template-kwargs, or the row's "
                f"chat_template_kwargs; the template reads {', '.join(sorted(self._template_variables))}"
            )
        how = {"add_generation_prompt": generation_prompt, "tokenize": True, "return_dict": False}
        return self._known(self._apply(messages, tools, variables, **how))

    def render_chat(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, variables: Mapping[str, Any] | None = None
    ) -> str:
        return self._apply(messages, tools, variables, add_generation_prompt=True, tokenize=False)

    @cached_property
    def _takes_parts_only(self) -> bool:
        """Whether the chat template drops a content that is a text and shows it as a list of parts (LLaVA-OneVision's).

        Such a template walks over the characters of a text and finds no parts among them, without an error.
        """

        def shows(content: str | list[dict[str, str]]) -> bool:
            try:
                message = {"role": "user", "content": content}
                return "probe" in self._tokenizer.apply_chat_template([message], tokenize=False)
            except Exception:  # a template is a program, and can raise any error
                return False

        return not shows("probe") and shows([{"type": "text", "text": "probe"}])

    def _apply(self, messages, tools, variables, **options) -> Any:
        if self._takes_parts_only:
            messages = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if isinstance(message.get("content"), str)
                else message
                for message in messages
            ]
        # OpenAI's protocol has the arguments of tool calls as JSON text. Most templates expect objects, and encode a
        # text once more or fail; DeepSeek's joins text.
        objects = [with_arguments(message, arguments_object) for message in messages]
        try:
            return self._rendered(objects, tools, variables, options)
        except GrpoError as refused:
            texts = [with_arguments(message, _arguments_text) for message in messages]
            if texts == objects:
                raise
            try:
                return self._rendered(texts, tools, variables, options)
            except GrpoError:  # the reason is not the arguments
                raise refused from None

    def _rendered(self, messages, tools, variables, options) -> Any:
        # transformers' own clock goes on: after midnight a conversation would be another one than its prompt.
        variables = {"strftime_now": self._now.strftime} | dict(variables or {})
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **options, **variables)
        # A template is a program, and can raise any error for messages that it does not expect.
        except Exception as error:
            raise GrpoError(f"the chat template in {self.directory} refuses these messages: {error}") from error

    def encode_after(self, token: int, text: str) -> list[int]:
        # Some tokenizers put a space before a text, but not behind a special token.
        before = self._tokenizer.convert_ids_to_tokens(token)
        ids = self._known(self._tokenizer.encode(before + text, add_special_tokens=False))
        assert ids[:1] == [token], f"{before} is not a special token"
        return ids[1:]


class SentencePieceTokenizer:
    """A SentencePiece .model file, without a chat template; as in Megatron-LM no BOS precedes a text."""

    text_start = ""

    def __init__(self, path: str | Path):
        from sentencepiece import SentencePieceProcessor  # only this tokenizer needs it

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
        self.longest_token: int = max(len(self._tokenizer.id_to_piece(i)) for i in range(self.vocab_size))
        control = filter(self._tokenizer.is_control, range(self.vocab_size))
        self.special_tokens: dict[str, int] = {self._tokenizer.id_to_piece(i): i for i in control}
        self.eos_id: int = self._tokenizer.eos_id()
        if self.eos_id < 0:
            raise GrpoError(
                f"--tokenizer-model {path}: the model was trained without an end-of-sequence piece (eos_id)"
            )
        self.pad_id: int = self._tokenizer.pad_id() if self._tokenizer.pad_id() >= 0 else self.eos_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    encode_rest = encode

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids)  # control tokens never have text

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        generation_prompt: bool = True,
    ) -> list[int]:
        raise GrpoError(
            "chat messages need a chat template, and a SentencePiece model has none; give the prompts as plain strings "
            "(and no --system-prompt), or use --tokenizer-type HuggingFaceTokenizer"
        )


class TikTokenizer:
    """A byte-pair vocabulary in Megatron-LM's JSON format, without a chat template.

    The ids are those of Megatron-LM: special tokens first, then num_special_tokens + rank. The encoding comes from
    megatron-core's reader, with its patterns v1 and v2. As in megatron-core, no BOS precedes a text, and special tokens
    in a text are encoded as special tokens. ``vocab_size`` (None: no limit) drops the last entries of the vocabulary.
    """

    text_start = ""

    def __init__(
        self,
        path: str | Path,
        pattern: str = "v2",
        num_special_tokens: int = 1000,
        special_tokens: list[str] | None = None,
        vocab_size: int | None = None,
    ):
        from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer as core  # only this tokenizer needs it

        special = list(special_tokens or core.SPECIAL_TOKENS)
        missing = [token for token in core.SPECIAL_TOKENS if token not in special]
        if missing or len(set(special)) < len(special):
            raise GrpoError(
                f"--tiktoken-special-tokens {' '.join(special)}: give each token once, and include all of "
                f"{' '.join(core.SPECIAL_TOKENS)}"
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
                f"--vocab-size ({vocab_size}) must be at least --tiktoken-num-special-tokens ({num_special_tokens}) + "
                "256 byte tokens"
            )
        self.vocab_size = num_special_tokens + count
        reader = core.TikTokenTokenizer(str(path), special, num_special_tokens, None, pattern, self.vocab_size)
        self._encoding, self._specials = reader.tokenizer, num_special_tokens
        self.special_tokens = {name: i for i, name in enumerate(special)}
        tokens = self._encoding.token_byte_values()
        self.longest_token = max(max(map(len, tokens)), max(map(len, special)))
        self.eos_id: int = reader.eos_id
        self.pad_id: int = reader.pad_id

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    encode_rest = encode

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._encoding.decode([i for i in ids if i >= self._specials or not skip_special_tokens])

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        generation_prompt: bool = True,
    ) -> list[int]:
        raise GrpoError(
            "chat messages need a chat template, and a tiktoken vocabulary has none; give the prompts as plain strings "
            "(and no --system-prompt), or use --tokenizer-type HuggingFaceTokenizer"
        )


def _check_tiktoken(path: Path) -> int:
    """Return the number of tokens in a vocabulary of Megatron-LM's JSON format; raise GrpoError for an invalid one."""
    form = 'a list of {"rank": 0, "token_bytes": BASE64, "token_str": ..}, rank by rank, the 256 bytes first'
    if not path.is_file() or path.suffix != ".json":
        raise GrpoError(
            f"--tokenizer-model {path}: TikTokenizer reads Megatron-LM's vocabulary file, .json with {form}; for a "
            ".tiktoken file or a directory with a tokenizer.json give --tokenizer-type HuggingFaceTokenizer"
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


def with_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls as ``change`` makes them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return {**message}
    return {**message, "tool_calls": [_call_with(call, change) for call in calls]}


def _call_with(call: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _call_with(function, change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def arguments_object(arguments: Any) -> Any:
    """Return the arguments of a tool call as an object: {} for an empty text; text that is not JSON stays."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments


def _arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def build_tokenizer(args: argparse.Namespace, now: datetime.datetime | None = None) -> Tokenizer:
    """Build the tokenizer of --tokenizer-type from --tokenizer-model; ``now`` as of `HuggingFaceTokenizer`."""
    match args.tokenizer_type:
        case "HuggingFaceTokenizer":
            return HuggingFaceTokenizer(args.tokenizer_model, args.chat_template, args.trust_remote_code, now)
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


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, visual: Collection[int] = ()) -> None:
    """Refuse a tokenizer with ids at or above ``vocab_size``, for which the model has no embedding.

    ``visual``: ids that stand for parts of images and videos. They need no embedding; InternVL3's last one has none.
    """
    size = tokenizer.vocab_size
    if size - (size - 1 in visual) > vocab_size:
        raise GrpoError(
            f"the tokenizer has {tokenizer.vocab_size} entries but the model's vocabulary holds {vocab_size}; "
            "give the tokenizer of the model (--tokenizer-model) or raise --vocab-size"
        )
