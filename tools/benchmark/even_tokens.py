"""Reward with different values for the completions of a random model: the fraction of even token ids."""

from megatron_grpo.rewards.registry import Sample, register_reward


@register_reward("even_tokens")
def even_tokens(sample: Sample) -> float:
    return sum(token % 2 == 0 for token in sample.token_ids) / len(sample.token_ids)
