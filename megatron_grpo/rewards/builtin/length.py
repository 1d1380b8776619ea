"""Penalties for repetition in a completion and for lengths near the limit."""

from megatron_grpo.rewards.registry import Sample, register_reward


@register_reward("repetition")
def repetition(sample: Sample, *, repetition_n_grams: int) -> float:
    """Return -(1 - unique / all) for the n-grams of the completion's words, n = --repetition-n-grams.

    The reward is 0 if no n-gram repeats, or if the completion has fewer than n words. Words are separated by white
    space and compared in lower case.

    Source: Yeo et al. 2025 (arXiv:2502.03373), a penalty of the same form.
    """
    words = sample.completion.lower().split()
    grams = list(zip(*(words[start:] for start in range(repetition_n_grams)), strict=False))
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


@register_reward("soft_overlong")
def soft_overlong(sample: Sample, *, max_completion_length: int, soft_cache_length: int) -> float:
    """Return 0 up to T - C tokens, and a linear decrease from 0 to -1 between T - C and T tokens.

    T = --max-completion-length, C = --soft-cache-length.

    Source: DAPO (Yu et al. 2025, arXiv:2503.14476), equation 13, soft overlong punishment.
    """
    free = max_completion_length - soft_cache_length
    return -min(max(len(sample.token_ids) - free, 0) / soft_cache_length, 1.0)
