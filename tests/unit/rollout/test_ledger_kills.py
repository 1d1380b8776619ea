"""A run that is killed at any moment goes on with every finished group: none is lost, none is trained on twice.

Processes kill themselves with SIGKILL.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter

import ledger_run
import pytest
from ledger_run import BATCHES, GROUPS

from megatron_grpo.rollout.ledger import content
from megatron_grpo.rollout.ledger.ledger import load, recorded_prompt

MODES = pytest.mark.parametrize("partial", [False, True], ids=["synchronous", "partial"])


@pytest.fixture(scope="module")
def start():
    """Return a function that runs ledger_run.py in a new process, up to a kill, and returns the exit status."""
    # The process of the tests cannot fork: libraries that other tests have imported have threads.
    command, path = [sys.executable, "-c", "import ledger_run; ledger_run.serve()"], os.pathsep.join(sys.path)
    forker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )

    def run(root, partial, kill=None):
        forker.stdin.write(json.dumps([str(root), partial, kill]) + "\n")
        forker.stdin.flush()
        return int(forker.stdout.readline())

    yield run
    forker.stdin.close()
    assert forker.wait() == 0


def tokens(found, keys):
    """Return the tokens of recorded groups, by key."""
    groups = load(found, keys, recorded_prompt)
    return {key: [completion.token_ids for completion in group.completions] for key, group in groups.items()}


def check(root, finished):
    """Check the run that has ended: ``finished`` are the tokens of groups that kills left in the ledger."""
    trained = [json.loads(line) for line in (root / "trained.jsonl").read_text().splitlines()]
    batches = {}
    for row in trained:
        assert batches.setdefault(row["number"], row) == row  # what was trained on again was the same
    assert sorted(batches) == list(range(BATCHES))
    found = content.read(root / "ledger")
    assert sorted(found.batches) == list(range(BATCHES))
    consumed = [key for number in range(BATCHES) for key in found.batches[number].groups]
    assert max(Counter(consumed).values()) == 1 and len(consumed) == BATCHES * GROUPS
    rows = Counter(row for batch in batches.values() for row in batch["rows"])
    assert set(rows.values()) == {ledger_run.GENERATIONS}
    at_the_end = tokens(found, found.groups)
    assert finished.items() <= at_the_end.items()
    last = found.unfinished.get((BATCHES - 1, 0))
    assert finished.keys() <= {*consumed, *(last[1] if last else ())}


def kills_and_check(start, root, partial, kills):
    """Kill a run at each of these moments, in turn, then let it end; return the number of kills that came in time."""
    (root / "ledger").mkdir()
    finished, count = {}, 0
    for kill in kills:
        status = start(root, partial, kill)
        assert status in (0, -signal.SIGKILL)
        count += status != 0
        if status == 0:
            break
        found = content.read(root / "ledger")
        finished |= tokens(found, found.groups)
    assert start(root, partial) == 0
    check(root, finished)
    return count


@MODES
def test_killed_before_each_fsync(start, tmp_path, partial):
    """One run for each fsync; what a kill after it leaves is what the kill before the next one leaves."""
    for at in range(1, 200):
        root = tmp_path / str(at)
        root.mkdir()
        if not kills_and_check(start, root, partial, [("fsync", at, False)]):
            break
    assert at > 4 * BATCHES  # a run has more than four of them for each batch


@MODES
def test_killed_again_and_again(start, tmp_path, partial):
    """Twenty kills at random steps of the engine, of one run after the other: each run is killed up to five times."""
    rng, count = random.Random(1), 0
    while count < 20:
        root = tmp_path / str(count)
        root.mkdir()
        count += kills_and_check(
            start, root, partial, [("poll", rng.randint(1, 14), rng.random() < 0.5) for _ in range(5)]
        )
