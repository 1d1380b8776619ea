"""The reward for thinking first and answering in tags."""

import re

from megatron_grpo.rewards.registry import Sample, register_reward

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FORMAT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


@register_reward("format")
def format_reward(sample: Sample) -> float:
    """1 when the completion is <think>..</think> and then <answer>..</answer>, else 0.

    Every tag once, and nothing but white space before, between and after. A prompt that ends with "<think>", as some
    chat templates make it, counts as the completion's beginning.
    """
    text = sample.completion
    if sample.prompt.rstrip().endswith("<think>"):
        text = "<think>" + text
    return float(all(text.count(tag) == 1 for tag in _TAGS) and _FORMAT.fullmatch(text) is not None)
