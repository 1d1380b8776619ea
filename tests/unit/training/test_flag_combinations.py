"""Bad combinations of flags, generated from tables of rules: none is accepted, each ends with a line that says why."""

import random
import re

import pytest
from flag_conflicts import ADVANTAGES, CONFLICTS, HARMLESS
from good_args import validated
from test_validation import REFUSED

from megatron_grpo.utils.errors import GrpoError

RULES = REFUSED | CONFLICTS | ADVANTAGES


def names(flags: str) -> set[str]:
    return {word for word in flags.split() if word.startswith("--")}


def alone(seed: int = 0) -> list[tuple[str, str]]:
    """Every rule once, among harmless flags that it does not name, in some order."""
    rng = random.Random(seed)
    cases = []
    for flags, word in RULES.items():
        others = [one for one in HARMLESS if not names(one) & names(flags)]
        parts = [flags, *rng.sample(others, rng.randint(0, 3))]
        rng.shuffle(parts)
        cases.append((" ".join(parts), word))
    return cases


def pairs(count: int = 100, seed: int = 1) -> list[str]:
    """Two rules broken at once, by flags of which none is in both, nor in the other message: it can be the cure."""
    rng, cases = random.Random(seed), []
    while len(cases) < count:
        first, second = rng.sample(list(REFUSED | CONFLICTS), 2)
        named = [names(flags) | set(re.findall(r"--[a-z-]+", RULES[flags])) for flags in (first, second)]
        if not named[0] & names(second) and not named[1] & names(first):
            cases.append(f"{first} {second}")
    return cases


def refusal(flags: str, capsys) -> str:
    """The one line with which these flags end a run."""
    try:
        validated(flags)
    except GrpoError as error:
        message = str(error)
    except SystemExit as error:
        assert error.code == 2
        message = capsys.readouterr().err.rstrip("\n")
    else:
        pytest.fail(f"accepted: {flags}")
    assert "\n" not in message and len(message) > 20
    return message


def test_there_are_enough_and_what_is_harmless_is_accepted():
    assert len(alone()) + len(pairs()) > 200
    assert validated(" ".join(HARMLESS)).seed == 7


@pytest.mark.parametrize(("flags", "word"), alone())
def test_a_broken_rule_is_named(flags, word, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert word in refusal(flags, capsys)


@pytest.mark.parametrize("flags", pairs())
def test_two_broken_rules_are_not_better_than_one(flags, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    said = refusal(flags, capsys)
    assert re.search(r"--[a-z]|\d|without its flag", said)  # a flag, the sizes that do not fit, or a value too many
