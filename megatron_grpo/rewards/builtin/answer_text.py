r"""Extraction of the answer from a completion: <answer> tags, \boxed{}, a line "Answer: ..", or a block of code."""

import re

from megatron_grpo.rewards.registry import Sample
from megatron_grpo.utils.errors import GrpoError

EXTRACTIONS = ("boxed", "line", "any")
UNFINISHED = ("wrong", "read")
EXTRACTION_COLUMN = "answer_extraction"  # of a row, in place of --answer-extraction

_BOXED, _BRACE = re.compile(r"\\boxed\s*+\{"), re.compile(r"(?<!\\)[{}]")
_BOXED_NUMBER = re.compile(r"\\boxed\s++([-+]?\d++(?:[.,/]\d++)*+)")
# Displayed mathematics after it can have several lines.
_LINE = re.compile(
    r"(?i)\banswer(?: is)?\s*+[*_]*+\s*+[:：]\s*+[*_]*+[ \t]*+"
    r"((?:\\\[[\s\S]{0,2000}?\\\]|\$\$[\s\S]{0,2000}?\$\$)[^\n]*|\S[^\n]*)"
)
_EMPHASIS_END = re.compile(r"(?<![*_^])[*_]+(?=\.?\s*$)")  # of **Answer: 42**
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE
)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...} with its nested braces or of \boxed 5, or None."""
    opened: list[int] = []  # where the contents of the braces begin that are open
    begins = {match.end() for match in _BOXED.finditer(text)}
    last = None
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.end())
        elif opened and (begin := opened.pop()) in begins and (last is None or begin > last[0]):
            last = begin, match.start()
    for match in _BOXED_NUMBER.finditer(text):
        last = match.span(1) if last is None or match.start(1) > last[0] else last
    return text[slice(*last)] if last else None


def after_reasoning(sample: Sample, unfinished_thinking: str = "wrong") -> str | None:
    """Return what the completion says after its reasoning, which ends with the last </think>.

    A completion without <think> has no reasoning, unless its prompt ends with <think>. If the reasoning does not end,
    the result is None; with ``unfinished_thinking`` "read" it is the whole completion.
    """
    _, end, said = sample.completion.rpartition("</think>")
    if end:
        return said
    apart = bool(sample.messages) and any(
        sample.messages[-1].get(key) for key in ("reasoning_content", "reasoning", "thinking")
    )
    begun = "<think>" in sample.completion or (sample.prompt.rstrip().endswith("<think>") and not apart)
    return None if begun and unfinished_thinking == "wrong" else sample.completion


def final_answer(sample: Sample, answer_extraction: str = "boxed", unfinished_thinking: str = "wrong") -> str | None:
    r"""Return the answer that the completion gives after its reasoning (`after_reasoning`), or None.

    It is the last <answer> text (or the last \boxed{} in it), else the last \boxed{} ("boxed"); the rest of the line
    after the last "Answer:" ("line"); or the first of these that there is ("any"). The row's column `EXTRACTION_COLUMN`
    replaces ``answer_extraction``.
    """
    given = sample.row.get(EXTRACTION_COLUMN)
    extraction = answer_extraction if given is None else given
    if extraction not in EXTRACTIONS:
        raise GrpoError(
            f'the row\'s "{EXTRACTION_COLUMN}" must be one of {", ".join(EXTRACTIONS)}, found {given!r:.80}'
        )
    text = after_reasoning(sample, unfinished_thinking)
    if text is None:
        return None
    answer = _boxed_answer(text) if extraction != "line" else None
    if answer is None and extraction != "boxed":
        lines = _LINE.findall(text)
        answer = (last_boxed(lines[-1]) or _EMPHASIS_END.sub("", lines[-1])) if lines else None
    return answer


def _boxed_answer(text: str) -> str | None:
    begin = text.rfind("<answer>", 0, text.rfind("</answer>") + 1)
    if begin < 0:
        return last_boxed(text)
    inside = text[begin + len("<answer>") : text.find("</answer>", begin)]
    return last_boxed(inside) or inside


def last_code_block(completion: str) -> str | None:
    """Return the last complete fenced block of code with the language Python or without a language, or None."""
    blocks = _FENCE.findall(completion)
    return blocks[-1] if blocks else None
