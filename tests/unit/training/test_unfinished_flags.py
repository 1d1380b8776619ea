"""A resume without the flags that continue the checkpoint's unfinished completions."""

import re

import pytest

from megatron_grpo.rollout.arguments import check_partial_rollouts
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.setup import _check_unfinished
from megatron_grpo.utils.errors import GrpoError

PLAIN, STREAM, PARTIAL = (
    {"rollouts": 3},
    {"rollouts": 3, "stream": {}},
    {"rollouts": 3, "partial": {"max_staleness": 2}},
)


@pytest.mark.parametrize(
    ("flags", "position", "message"),
    [
        ("--rollout-ranks 1", PLAIN, "run was saved without --rollout-ranks: leave it out"),
        ("", STREAM, "run holds completions of engines on ranks of their own: add --rollout-ranks as before"),
        ("--partial-rollouts", STREAM, "run holds completions of engines on ranks of their own"),
        ("", PARTIAL, "run holds unfinished completions: add --partial-rollouts --max-staleness 2"),
    ],
)
def test_other_flags_are_refused(flags, position, message):
    with pytest.raises(GrpoError, match=f"{re.escape(message)}.*, or load only the weights with --finetune"):
        _check_unfinished(parse_args(["--load", "run", *flags.split()]), position)


@pytest.mark.parametrize(
    ("flags", "position"),
    [
        ("--rollout-ranks 1", STREAM),
        ("--partial-rollouts", PARTIAL),
        ("--partial-rollouts", PLAIN),
        ("--rollout-ranks 1", {}),  # no checkpoint
        ("--train-only recorded", STREAM),
        ("--replay-rollouts recorded", PARTIAL),
    ],
)
def test_the_same_flags_are_not(flags, position):
    _check_unfinished(parse_args(["--load", "run", *flags.split()]), position)


def test_a_sleeping_engine_keeps_no_requests():
    flags = (
        "--partial-rollouts --max-staleness 1 --rollout-importance-sampling-mode token_truncate --weight-update keep"
    )
    check_partial_rollouts(parse_args(flags.split()))
    with pytest.raises(
        GrpoError, match=r"^--weight-update keep and --sleep-level 2 cannot both.*: .*give --sleep-level 0$"
    ):
        check_partial_rollouts(parse_args([*flags.split(), "--sleep-level", "2"]))
