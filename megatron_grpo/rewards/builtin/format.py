"""Rewards for thinking first and then answering in tags, or calling a tool."""

import re

from megatron_grpo.rewards.registry import Sample, register_reward

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THINK = ("<think>", "</think>")
_FORMAT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_REACT = re.compile(r"\s*<think>.*</think>\s*Action:[ \t]*\S[^\n]*\n\s*Action Input:\s*\S.*", re.DOTALL)


@register_reward("format")
def format_reward(sample: Sample) -> float:
    """1 when the completion is <think>..</think> and then <answer>..</answer>, else 0.

    Every tag once, and nothing but white space before, between and after. A prompt that ends with "<think>", as some
    chat templates make it, counts as the completion's beginning.
    """
    text = _with_opened_thought(sample)
    return float(all(text.count(tag) == 1 for tag in _TAGS) and _FORMAT.fullmatch(text) is not None)


@register_reward("react_format")
def react_format(sample: Sample) -> float:
    """1 when the completion is <think>..</think>, then "Action: name", then "Action Input: ..." to its end, else 0.

    Each of the four once. A prompt that ends with "<think>" counts as the completion's beginning.

    Source: Yao et al. 2022, ReAct (arXiv:2210.03629), with the thought in tags.
    """
    text = _with_opened_thought(sample)
    once = all(text.count(part) == 1 for part in (*_THINK, "Action:", "Action Input:"))
    return float(once and _REACT.fullmatch(text) is not None)


def _with_opened_thought(sample: Sample) -> str:
    return ("<think>" if sample.prompt.rstrip().endswith("<think>") else "") + sample.completion
