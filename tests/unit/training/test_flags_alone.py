"""Every flag, given alone, is read by a run, refused, or listed here with its effect; pairs are accepted or refused."""

import argparse
import random
from itertools import combinations

import pytest
from bad_input_bench import Bench
from bad_input_runs import model  # noqa: F401 (fixture)
from recorded_flags import flags_read_by

from megatron_grpo.estimate.dry_run import dry_run_report
from megatron_grpo.training.arguments import ACCEPTED, FLAGS, build_parser, parse_args
from megatron_grpo.training.resolve import resolve_args, resolve_origin
from megatron_grpo.utils.core_flags import core_flags, integer_or_pattern, integers
from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.utils.flag_values import integer_or_auto

# Flags that a run accepts and whose values nothing reads after the checks, with their effect.
EXPLAINED = {
    "--make-vocab-size-divisible-by": "the checks derive padded_vocab_size from it",
    "--on-save-error": "of a save or a row of metrics that cannot be written: the run of the test has none",
    "--seq-length": "the checks compare the longest sequence with it",
    "--logprobs-max-tokens-per-microbatch": "the size of forward-only passes, and the run of the test has none",
    "--unfinished-thinking": "reward functions read it, in processes of their own",
    "--init-method-std": "of weights that are not loaded; print_args says so",
    "--embedding-init-method-std": "of weights that are not loaded; print_args says so",
}

ROWS = (
    '{"messages": [{"role": "user", "content": "1"}], "answer": "2"}',
    '{"prompt": "12345678901", "answer": "2"}',  # too long
    '{"prompt": "1+1=", "answer": "2"}',
    "{",  # not JSON
)
# Values of each type: a flag counts as refused only if all of them are.
VALUES = {
    int: ("1", "2", "64", "512"),
    float: ("0.5", "0.25", "1.5"),
    str: ("word", "other"),
    integers: ("7,0",),
    integer_or_pattern: ("2", "[1,0]"),
    integer_or_auto: ("1", "2"),
}
PAIRS = 100  # of all pairs, without --all


def settings(action: argparse.Action) -> list[list[str]]:
    """Return the words that set a flag to other values than its default."""
    option = action.option_strings[0]
    if action.nargs == 0:  # a switch
        return [] if getattr(action, "const", None) == action.default else [[option]]
    values = action.choices or VALUES.get(action.type, ('{"a": 1}',))
    return [[option, value] for value in values if value != str(action.default)]


ACTIONS = {action.option_strings[0]: action for action in build_parser()._actions if action.dest != "help"}
SETTINGS = {option: settings(action) for option, action in ACTIONS.items() if settings(action)}


def capabilities() -> dict[str, list[str]]:
    """Return the flags of each capability: the groups of our tables, and the sections of megatron-core."""
    groups = {title: [name for name, *_ in rows] for title, rows in FLAGS.items()}
    for core in core_flags().values():
        groups.setdefault(core.section, []).append(core.option)
    return {title: [name for name in names if name in SETTINGS] for title, names in groups.items()}


@pytest.fixture(scope="module")
def good(model, tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("flags"), model)


def refusal(words: list[str], capsys, report: bool = False) -> str | None:
    """Return the line with which these flags end a run, or None; with ``report``, make the dry run's report, too."""
    try:
        args = parse_args(words)
        args = resolve_origin(args, resume=False)
        args = resolve_args(args, 1)
        if report:
            dry_run_report(args, 1)
    except GrpoError as error:
        message = str(error)
    except SystemExit:
        message = capsys.readouterr().err.rstrip("\n")
    else:
        return None
    assert len(message) > 20 and "\n" not in message, message
    return message


@pytest.mark.slow
def test_every_flag_alone_is_read_refused_or_explained(good, capsys):
    skipping = ["--bad-rows", "skip", "--truncation-strategy", "delete"]
    reads = flags_read_by([*good.good, *good.data(*ROWS), *skipping])
    good.save.rename(good.root / "of_the_run")  # a --save with a checkpoint would be refused
    found: dict[str, list[str]] = {"read": [], "refused": [], "explained": [], "nothing": []}
    for option, choices in SETTINGS.items():
        if ACTIONS[option].dest in reads:
            kind = "read"
        elif all(refusal(good.good + words, capsys) for words in choices):
            kind = "refused"
        else:
            kind = "explained" if option in EXPLAINED or option in ACCEPTED else "nothing"
        found[kind].append(option)
    assert found["nothing"] == []
    assert set(found["explained"]) == {*EXPLAINED, *ACCEPTED}
    assert len(found["read"]) > 200 and len(found["refused"]) > 100  # the record works
    for option in ("--lr", "--seed", "--top-p", "--vllm-dtype", "--adam-beta2", "--truncation-strategy"):
        assert option in found["read"]
    for option in ("--hysteresis", "--optimizer-offload-fraction", "--recompute-method", "--moe-router-topk"):
        assert option in found["refused"]


def pairs() -> list[tuple[list[str], list[str]]]:
    """Return every pair of flags of one capability, each with its first value."""
    return [
        (SETTINGS[first][0], SETTINGS[second][0])
        for names in capabilities().values()
        for first, second in combinations(names, 2)
    ]


def check_pairs(good, some, capsys) -> None:
    for first, second in some:
        try:
            refusal([*good.good, "--dry-run", *first, *second], capsys, report=True)
        except Exception as error:
            raise AssertionError(f"{' '.join(first + second)}: {error!r}") from error


def test_some_pairs_of_a_capability_are_accepted_or_refused_with_one_line(good, capsys):
    check_pairs(good, random.Random(0).sample(pairs(), PAIRS), capsys)


@pytest.mark.slow
def test_all_pairs_of_a_capability_are_accepted_or_refused_with_one_line(good, capsys):
    check_pairs(good, pairs(), capsys)
