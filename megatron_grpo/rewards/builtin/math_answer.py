"""Rewards for answers that equal the gold answer mathematically (math_reading.py, math_equal.py)."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NoReturn

from math_verify.errors import TimeoutException

from megatron_grpo.rewards.builtin import math_equal, math_reading
from megatron_grpo.rewards.builtin.answer_text import final_answer, last_boxed
from megatron_grpo.rewards.builtin.short_answer import gold_text
from megatron_grpo.rewards.registry import Sample, register_reward
from megatron_grpo.utils.errors import GrpoError

# Limit of reading an answer and of a comparison, in seconds of CPU time, so that a busy machine does not turn right
# answers into wrong ones. An expression that sympy cannot evaluate in time is a wrong answer. The pool's limit of the
# whole call is above the sum of these limits; it counts wall time, and such a call is not scored.
_STEP_TIMEOUT = 3


@contextmanager
def _limited() -> Iterator[None]:
    """Raise TimeoutException (a BaseException) after `_STEP_TIMEOUT` s of CPU time, in the main thread (SIGPROF)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> NoReturn:
        raise TimeoutException

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _STEP_TIMEOUT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@cache
def _warm_up() -> None:
    """Parse and compare once without a limit: the first time builds the parser's tables and imports parts of sympy."""
    math_equal.equal(math_reading.read("(0,1)"), math_reading.read("0<x<1"))


@lru_cache(maxsize=4096)  # one gold answer serves every completion of its prompt
def read(text: str) -> Any:
    """Return the value of an answer's text (`math_reading.read`); TimeoutError if that takes too long.

    The cache does not keep time-outs, because a slow machine can cause them.
    """
    try:
        with _limited():
            return math_reading.read(text)
    except TimeoutException as error:
        raise TimeoutError(f"{text[:200]!r} was not parsed within {_STEP_TIMEOUT} s") from error


@lru_cache(maxsize=4096)
def _gold_fault(text: str) -> str | None:
    try:
        with _limited():
            return math_reading.gold_fault(text)
    except TimeoutException:
        return f"it was not parsed within {_STEP_TIMEOUT} s"


@register_reward("accuracy")
def accuracy(sample: Sample, *, answer_extraction: str = "boxed", unfinished_thinking: str = "wrong") -> float:
    r"""Return 1 if the completion's answer (`final_answer`) equals the gold answer mathematically, else 0.

    The gold answer is in the row's answer (data/answer_column.py): the last \boxed{}, else the text after "####", else
    the whole text. A gold answer that cannot be compared with is an error in the data: GrpoError. If the gold answer is
    not parsed in time, the sample fails.
    """
    text = gold_text(sample)
    gold_answer = last_boxed(text) or text.rpartition("####")[2]
    if fault := _gold_fault(gold_answer):
        raise GrpoError(
            f"the gold answer {text[-200:]!r} cannot be compared with, because {fault}: correct it, or use "
            "--reward-funcs exact_match for text"
        )
    answer = final_answer(sample, answer_extraction, unfinished_thinking)
    if answer is None or not answer.strip():
        return 0.0
    _warm_up()
    gold = read(gold_answer)
    try:
        value = read(answer)
        with _limited():
            return float(math_equal.equal(gold, value))
    # Also sympy's errors about expressions that it cannot evaluate, which are of many kinds.
    except (TimeoutException, Exception):
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
    answer_extraction: str = "boxed",
    unfinished_thinking: str = "wrong",
) -> float:
    """Return a reward for `accuracy` that depends on the length by half a cosine period.

    v(max) + (v(min) - v(max)) (1 + cos(pi t / T)) / 2, where t is the number of sampled tokens, at most T,
    T = --max-completion-length, and v(min), v(max) are the rewards at lengths 0 and T. Right and wrong answers have
    separate values (four flags). By default, short right answers and long wrong answers have higher rewards.

    Source: Yeo et al. 2025, Demystifying Long Chain-of-Thought Reasoning in LLMs (arXiv:2502.03373).
    """
    right = accuracy(sample, answer_extraction=answer_extraction, unfinished_thinking=unfinished_thinking) == 1.0
    shortest = cosine_min_len_value_correct if right else cosine_min_len_value_wrong
    longest = cosine_max_len_value_correct if right else cosine_max_len_value_wrong
    share = min(sample.num_sampled / max_completion_length, 1.0)
    return longest + (shortest - longest) * (1.0 + math.cos(math.pi * share)) / 2.0
