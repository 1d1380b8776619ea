"""Rewards (penalties, in fact) for completions that repeat themselves or come near the length limit."""

from megatron_grpo.rewards.registry import Sample, register_reward


@register_reward("repetition")
def repetition(sample: Sample, *, repetition_n_grams: int) -> float:
    """-(1 - unique / all) n-grams of the completion's words, n = --repetition-n-grams: 0 when none comes twice.

    Words are what white space separates, in lower case. A completion of fewer than n words has 0.

    Source: Yeo et al. 2025 (arXiv:2502.03373), where it is a penalty of the same form.
    """
    words = sample.completion.lower().split()
    grams = list(zip(*(words[start:] for start in range(repetition_n_grams)), strict=False))
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


@register_reward("soft_overlong")
def soft_overlong(sample: Sample, *, max_completion_length: int, soft_cache_length: int) -> float:
    """0 up to T - C tokens, then falling linearly to -1 at T: T = --max-completion-length, C = --soft-cache-length.

    Source: DAPO (Yu et al. 2025, arXiv:2503.14476), equation 13, soft overlong punishment.
    """
    free = max_completion_length - soft_cache_length
    return -min(max(len(sample.token_ids) - free, 0) / soft_cache_length, 1.0)
