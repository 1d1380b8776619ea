"""Rewards for the format of a completion: reasoning, then an answer in tags or a tool call."""

import re

from megatron_grpo.rewards.registry import Sample, register_reward

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THINK = ("<think>", "</think>")
_FORMAT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_REACT = re.compile(r"\s*<think>.*</think>\s*Action:[ \t]*\S[^\n]*\n\s*Action Input:\s*\S.*", re.DOTALL)


@register_reward("format")
def format_reward(sample: Sample) -> float:
    """Return 1 if the completion is <think>..</think> and then <answer>..</answer>, else 0.

    Each tag occurs once, with only white space before, between and after the two parts. If the prompt ends with
    "<think>", as with some chat templates, this tag counts as the beginning of the completion.
    """
    text = _with_think_tag(sample)
    return float(all(text.count(tag) == 1 for tag in _TAGS) and _FORMAT.fullmatch(text) is not None)


@register_reward("react_format")
def react_format(sample: Sample) -> float:
    """Return 1 if the completion is <think>..</think>, "Action: name" and "Action Input: ..." to the end, else 0.

    Each of these four markers occurs once. If the prompt ends with "<think>", this tag counts as the beginning of the
    completion.

    Source: Yao et al. 2022, ReAct (arXiv:2210.03629); here the reasoning is in tags.
    """
    text = _with_think_tag(sample)
    once = all(text.count(part) == 1 for part in (*_THINK, "Action:", "Action Input:"))
    return float(once and _REACT.fullmatch(text) is not None)


def _with_think_tag(sample: Sample) -> str:
    return ("<think>" if sample.prompt.rstrip().endswith("<think>") else "") + sample.completion
