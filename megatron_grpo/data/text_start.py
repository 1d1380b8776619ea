"""The special tokens that a tokenizer puts before a text (BOS), and that a rendered chat template has already."""

from typing import Any


def text_start(tokenizer: Any) -> str:
    """Return the text of the special tokens that ``tokenizer.encode`` puts before a text; "" if there are none."""
    with_start, own = tokenizer.encode("1"), tokenizer.encode("1", add_special_tokens=False)
    count = len(with_start) - len(own)
    return "".join(tokenizer.convert_ids_to_tokens(with_start[:count])) if with_start[count:] == own else ""


def encode_once(tokenizer: Any, text: str, start: str) -> list[int]:
    """Return the ids of a text that begins with the special tokens of ``start`` (`text_start`) once.

    A text that has them already, such as a rendered chat template, gets no second ones.
    """
    return tokenizer.encode(text, add_special_tokens=not (start and text.startswith(start)))
