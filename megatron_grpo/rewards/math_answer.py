"""The reward for a mathematically equal answer, decided by math-verify (sympy)."""

import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from megatron_grpo.errors import GrpoError
from megatron_grpo.rewards.registry import Sample, register_reward
from megatron_grpo.rewards.short_answer import gold_text

# math-verify's own limits (SIGALRM, hence a process's main thread): an expression that sympy cannot finish is a wrong
# answer. The pool's limit on the whole call stays above their sum.
_SECONDS = 3
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_DELIMITED = re.compile(r"\$|\\\(|\\\[")
# A word that stands by itself once LaTeX commands and their text are gone: prose, which math-verify is to search.
_WORD = re.compile(r"(?:^|\s)[A-Za-z]{3,}(?=[\s.,:;!?]|$)")
_COMMAND = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} with its nested braces, or None."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            if depth == 0:
                return text[start:end]
    return None


def final_answer(completion: str) -> str | None:
    r"""What a completion gives as its answer: the last <answer> text (or a \boxed{} in it), else the last \boxed{}."""
    tagged = _ANSWER.findall(completion)
    text = tagged[-1] if tagged else completion
    return last_boxed(text) or (text if tagged else None)


@lru_cache(maxsize=4096)  # one gold answer serves every completion of its prompt
def read(text: str) -> tuple[Any, ...]:
    """The sympy expression in a text as math-verify reads it, or () when there is none or it takes too long."""
    text = " ".join(text.split())
    if not _DELIMITED.search(text) and not _WORD.search(_COMMAND.sub(" ", text)):
        text = f"${text.rstrip('.')}$"
    try:
        return tuple(parse(text, fallback_mode="no_fallback", parsing_timeout=_SECONDS))
    except TimeoutException:  # a BaseException, which parse lets through
        return ()


@register_reward("accuracy")
def accuracy(sample: Sample) -> float:
    r"""1 when the completion's answer (<answer> text or the last \boxed{}) equals the gold one mathematically, else 0.

    Gold is row["answer"] or else row["solution"]: the last \boxed{} in it, or what follows "####", or all of it. A gold
    answer that math-verify cannot read is an error in the data and ends the run.
    """
    text = gold_text(sample, "answer", "solution")
    gold = read(last_boxed(text) or text.rpartition("####")[2])
    if not gold:
        raise GrpoError(
            f"math-verify finds no mathematical expression in the gold answer {text[-200:]!r}; for text use exact_match"
        )
    answer = final_answer(sample.completion)
    return float(answer is not None and verify(list(gold), list(read(answer)), timeout_seconds=_SECONDS))
