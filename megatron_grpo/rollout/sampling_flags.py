"""Flags of reuse and sampling: prompts and groups of a rollout, constrained completions, and when a run ends early.

Rows are those of ``arguments.FLAGS``; the rules are in ``sampling_rules``, the description in docs/sampling.md.
"""

from typing import Any

Row = tuple[str, Any, Any, str]

CHOICE: tuple[Row, ...] = (
    ("--dynamic-sample", bool, False, "replace groups whose rewards are all alike by groups of fresh prompts"),
    ("--max-resample-times", int, 3, "replacements one after the other, before a group without signal is taken"),
    ("--over-sampling-ratio", float, 1.0, "begin so many times the prompts, keep the first groups that are complete"),
    ("--curriculum", bool, False, "visit prompts from easy to hard in each epoch, by the rows' pass_rate"),
    ("--min-pass-rate", float, None, "leave out training prompts with a lower pass_rate [keep all]"),
    ("--max-pass-rate", float, None, "leave out training prompts with a higher pass_rate [keep all]"),
    ("--structured-outputs-regex", str, None, "regular expression that every completion has to match"),
)

ENDS: tuple[Row, ...] = (
    ("--exit-duration-in-mins", int, None, "save and end this run, once a rollout is used up, after so many minutes"),
    ("--exit-signal-handler", bool, False, "save and end this run, once a rollout is used up, on SIGTERM"),
)

WEIGHT_DECAY: tuple[Row, ...] = (
    ("--start-weight-decay", float, None, "weight decay of the first update, with --weight-decay-incr-style"),
    ("--end-weight-decay", float, None, "weight decay of the last update"),
    ("--weight-decay-incr-style", ("constant", "linear", "cosine"), "constant", "how it gets from one to the other"),
)
