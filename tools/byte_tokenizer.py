"""Tokenizer with one token for each byte, of the tiny models."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer(more: Sequence[str] = (), before: Sequence[str] = ()) -> Tokenizer:
    """Build a tokenizer without merges whose tokens are `before`, the 256 bytes and `more`."""
    tokens = [*before, *sorted(pre_tokenizers.ByteLevel.alphabet()), *more]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(before))
    return tokenizer
