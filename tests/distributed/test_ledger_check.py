"""Kills of whole runs with a ledger, by the tool that makes the figures of docs/performance.md."""

import subprocess
import sys

import pytest
from ranks import REPO

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.distributed]


@pytest.mark.parametrize("mode", ["asynchronous", "partial"])
def test_kills_lose_nothing_and_a_replay_is_equal(tmp_path, mode):
    command = [sys.executable, REPO / "tools" / "ledger_check.py", tmp_path, "--mode", mode, "--kills", "3"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained on once" in done.stdout and "bit for bit" in done.stdout
