"""Reward that the environment of an episode gave."""

from megatron_grpo.rewards.registry import Sample, register_reward


@register_reward("environment")
def environment(sample: Sample) -> float | None:
    """Return the sum of the environment's rewards of all turns (--environment); None if it gave none."""
    return sample.environment_reward
