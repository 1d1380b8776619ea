"""Kills of whole runs with a ledger, by the tool that makes the figures of docs/performance/robustness.md."""

import subprocess
import sys

import pytest
from ranks import REPO

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.distributed]


CASES = {
    "asynchronous": "--mode asynchronous -- --top-k 4",
    "partial": "--mode partial --nproc-per-node 2",
    "synchronous": "--mode synchronous -- --dynamic-sample",
}


@pytest.mark.parametrize("case", CASES)
def test_kills_lose_nothing_and_a_replay_is_equal(tmp_path, case):
    command = [sys.executable, REPO / "tools" / "ledger_check.py", tmp_path, "--kills", "3", *CASES[case].split()]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained on once" in done.stdout and "bit for bit" in done.stdout
