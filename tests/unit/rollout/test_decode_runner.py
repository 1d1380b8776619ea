"""The short path of a model runner, of which vLLM's part is made up: several tokens of each request in a step."""

import json
from pathlib import Path

import pytest
from interpreted import last_line

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def answers() -> dict:
    return json.loads(last_line(Path(__file__).parent / "decode_runner_worker.py"))


@pytest.mark.parametrize("log_probs", [True, False])
def test_a_step_of_several_tokens_is_as_many_steps(answers, log_probs):
    """Also when a request has ended before it: the batch has a row that is empty."""
    facts = answers[f"log-probabilities {log_probs}"]
    single, several = facts["single"], facts["several"]
    assert single == several and [len(several[name]) for name in "abc"] == [12, 2, 12]
    assert all((log_prob is not None) == log_probs for _, log_prob in several["a"])
    assert len({token for token, _ in several["a"]}) > 6
    assert facts["launches"] == ["attention", "forward", "sample"] * 12
    assert facts["bounds"] == facts["lengths"]  # they grow with each token
