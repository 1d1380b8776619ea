"""Kernels that sample tokens, in Triton's interpreter."""

import json
from pathlib import Path

import pytest
from interpreted import last_line

CRITICAL = 25.7  # of chi-square with 5 degrees of freedom: one of 10,000 is larger


@pytest.fixture(scope="module")
def answers() -> dict:
    return json.loads(last_line(Path(__file__).parent / "sampling_kernels_worker.py"))


def test_a_row_has_its_token_wherever_it_lies(answers):
    equal = {name: answer for name, answer in answers.items() if isinstance(answer, bool)}
    assert len(equal) == 9 and all(equal.values()), equal


def test_tokens_have_their_probabilities(answers):
    values = {name: answer for name, answer in answers.items() if name.startswith("chi-square")}
    assert len(values) == 2 and all(value < CRITICAL for value in values.values()), values


def test_a_token_is_where_the_probabilities_pass_the_random_number(answers):
    """The random words are those of Random123's description of Philox."""
    assert answers["misplaced tokens"] == 0, answers
    assert answers["error of the random numbers"] < 1e-15, answers
