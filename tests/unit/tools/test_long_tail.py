"""tools/benchmark/long_tail.sh: a dry run has no table, a run has one."""

import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("dry_run", ["0", "1"])
def test_the_programs_of_a_run(tmp_path, dry_run):
    """Commands that only print their own names stand for Python and torchrun."""
    for name in ("python3", "torchrun"):
        command = tmp_path / name
        command.write_text('#!/bin/sh\necho "$(basename "$0") $*" >> "$CALLS"\n')
        command.chmod(0o755)
    calls = tmp_path / "calls"
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "DRY_RUN": dry_run,
        "STALENESS": "1 4",
    }
    subprocess.run(
        ["bash", REPO / "tools/benchmark/long_tail.sh", "local", tmp_path / "run"], env=environment, check=True
    )
    lines = calls.read_text().splitlines()
    runs = [line for line in lines if "tools/benchmark/long_tail.py" in line]
    assert [("--partial-rollouts" in line, "--dry-run" in line) for line in runs] == [
        (partial, dry_run == "1") for partial in (False, True, True)
    ]
    assert ("step_table.py" in lines[-1]) == (dry_run == "0")
