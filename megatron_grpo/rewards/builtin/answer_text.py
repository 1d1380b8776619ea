r"""Extraction of the answer from a completion: <answer> tags, \boxed{}, or a fenced block of code."""

import re

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE
)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...} with its nested braces, or None."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            if depth == 0:
                return text[start:end]
    return None


def final_answer(completion: str) -> str | None:
    r"""Return the answer: the last <answer> text (or the last \boxed{} in it), else the last \boxed{}, or None."""
    tagged = _ANSWER.findall(completion)
    text = tagged[-1] if tagged else completion
    return last_boxed(text) or (text if tagged else None)


def last_code_block(completion: str) -> str | None:
    """Return the last complete fenced block of code with the language Python or without a language, or None."""
    blocks = _FENCE.findall(completion)
    return blocks[-1] if blocks else None
