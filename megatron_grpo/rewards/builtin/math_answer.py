"""Rewards for a mathematically equal answer, decided by math-verify (sympy)."""

import math
import re
import time
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from megatron_grpo.rewards.builtin.answer_text import final_answer, last_boxed
from megatron_grpo.rewards.builtin.short_answer import gold_text
from megatron_grpo.rewards.registry import Sample, register_reward
from megatron_grpo.utils.errors import GrpoError

# math-verify's own limits (SIGALRM, hence a process's main thread): an expression that sympy cannot finish is a wrong
# answer. The pool's limit on the whole call stays above their sum.
_SECONDS = 3
_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[")
# Thousands set apart by a space, which math-verify would take for a mixed number: 1\,234 for 1 + 234.
_SPACED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,;!: ]|~| )\d{3})+(?!\d)")
# A word that stands by itself once LaTeX commands and their text are gone: prose, which math-verify is to search.
_WORD = re.compile(r"(?:^|\s)[A-Za-z]{3,}(?=[\s.,:;!?]|$)")
_COMMAND = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")


@lru_cache(maxsize=4096)  # one gold answer serves every completion of its prompt
def read(text: str) -> tuple[Any, ...]:
    """The sympy expression in a text as math-verify reads it, or () when there is none; TimeoutError when it takes too
    long, which may be the machine's fault, and so is not remembered.
    """
    text = _SPACED.sub(lambda match: re.sub(r"\D", "", match[0]), " ".join(text.split()))
    if not _DELIMITED.search(text) and not _WORD.search(_COMMAND.sub(" ", text)):
        text = f"${text.rstrip('.')}$"
    begun = time.monotonic()
    try:
        found = tuple(parse(text, fallback_mode="no_fallback", parsing_timeout=_SECONDS))
    except TimeoutException:  # a BaseException, which parse lets through at times; at others it finds nothing
        found = ()
    if not found and time.monotonic() - begun >= _SECONDS:
        raise TimeoutError(f"math-verify did not read {text[:200]!r} within {_SECONDS} s")
    return found


@register_reward("accuracy")
def accuracy(sample: Sample) -> float:
    r"""1 when the completion's answer (<answer> text or the last \boxed{}) equals the gold one mathematically, else 0.

    Gold is row["answer"] or else row["solution"]: the last \boxed{} in it, or what follows "####", or all of it. A gold
    answer that math-verify cannot read is an error in the data and ends the run; one that it does not read in time is a
    failure of this sample.
    """
    text = gold_text(sample, "answer", "solution")
    gold = read(last_boxed(text) or text.rpartition("####")[2])
    if not gold:
        raise GrpoError(
            f"math-verify finds no mathematical expression in the gold answer {text[-200:]!r}; for text use exact_match"
        )
    answer = final_answer(sample.completion)
    try:
        return float(answer is not None and verify(list(gold), list(read(answer)), timeout_seconds=_SECONDS))
    except TimeoutError:
        return 0.0


@register_reward("cosine")
def cosine(
    sample: Sample,
    *,
    max_completion_length: int,
    cosine_min_len_value_correct: float,
    cosine_max_len_value_correct: float,
    cosine_min_len_value_wrong: float,
    cosine_max_len_value_wrong: float,
) -> float:
    """`accuracy` along half a cosine of the length: short is best where the answer is right, worst where it is wrong.

    v(max) + (v(min) - v(max)) (1 + cos(pi t / T)) / 2 with t the completion's tokens, T --max-completion-length, and
    v(min), v(max) the values at lengths 0 and T of a right or of a wrong answer (four flags).

    Source: Yeo et al. 2025, Demystifying Long Chain-of-Thought Reasoning in LLMs (arXiv:2502.03373).
    """
    right = accuracy(sample) == 1.0
    shortest = cosine_min_len_value_correct if right else cosine_min_len_value_wrong
    longest = cosine_max_len_value_correct if right else cosine_max_len_value_wrong
    share = min(len(sample.token_ids) / max_completion_length, 1.0)
    return longest + (shortest - longest) * (1.0 + math.cos(math.pi * share)) / 2.0
