"""Penalties for repetition in a completion and for lengths near the limit."""

import re

from megatron_grpo.rewards.registry import Sample, register_reward

# Characters of scripts without spaces between words (Thai, Lao, Tibetan, Burmese, Khmer, Japanese, Chinese); each is a
# word. Any other word is what white space and these characters leave.
_WITHOUT_SPACES = (
    r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff60"
    r"\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_WITHOUT_SPACES}]|[^\s{_WITHOUT_SPACES}]+")
_LONGEST_WORD = 100  # characters; a longer run without white space, such as "!!!!..", has a word for each character


def words_of(text: str) -> list[str]:
    """Return the words of a text in any script: runs without white space, and characters of scripts without spaces."""
    return [part for word in _WORD.findall(text) for part in ([word] if len(word) <= _LONGEST_WORD else word)]


@register_reward("repetition")
def repetition(sample: Sample, *, repetition_n_grams: int) -> float:
    """Return -(1 - unique / all) for the n-grams of the completion's words, n = --repetition-n-grams.

    The reward is 0 if no n-gram repeats, or if the completion has fewer than n words (`words_of`), which are compared
    in lower case.

    Source: Yeo et al. 2025 (arXiv:2502.03373), a penalty of the same form.
    """
    words = words_of(sample.completion.lower())
    grams = list(zip(*(words[start:] for start in range(repetition_n_grams)), strict=False))
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


@register_reward("soft_overlong")
def soft_overlong(sample: Sample, *, max_completion_length: int, soft_cache_length: int) -> float:
    """Return 0 up to T - C sampled tokens, and a linear decrease from 0 to -1 between T - C and T tokens.

    T = --max-completion-length, C = --soft-cache-length.

    Source: DAPO (Yu et al. 2025, arXiv:2503.14476), equation 13, soft overlong punishment.
    """
    free = max_completion_length - soft_cache_length
    return -min(max(sample.num_sampled - free, 0) / soft_cache_length, 1.0)
