"""A run that is killed at any moment goes on with every finished group: none is lost, none is trained on twice.

Processes kill themselves with SIGKILL.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter

import ledger_run
import pytest
from ledger_run import BATCHES, GROUPS

from megatron_grpo.rollout.ledger import content
from megatron_grpo.rollout.ledger.ledger import load, recorded_prompt

# By default test_placed.py has kills within one process; here a second process imports everything, for 20 s.
pytestmark = pytest.mark.slow
MODES = pytest.mark.parametrize("partial", [False, True], ids=["synchronous", "partial"])


@pytest.fixture(scope="module")
def start():
    """Return a function that runs ledger_run.py in a new process, up to a kill, and returns the exit status."""
    # The process of the tests cannot fork: libraries that other tests have imported have threads.
    command, path = [sys.executable, "-c", "import ledger_run; ledger_run.serve()"], os.pathsep.join(sys.path)
    forker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )

    def run(root, partial, kill=None, words=()):
        forker.stdin.write(json.dumps([str(root), partial, kill, words]) + "\n")
        forker.stdin.flush()
        return int(forker.stdout.readline())

    yield run
    forker.stdin.close()
    assert forker.wait() == 0


def tokens(found, keys):
    """Return the tokens of recorded groups, by key."""
    groups = load(found, keys, recorded_prompt)
    return {key: [completion.token_ids for completion in group.completions] for key, group in groups.items()}


def check_trained(root, number):
    """Check the batches of a run that has ended: one that was repeated had the same tokens; no group is in two."""
    batches = {}
    for line in (root / "trained.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert batches.setdefault(row["number"], row) == row
    assert sorted(batches) == list(range(number))
    rows = Counter(row for batch in batches.values() for row in batch["rows"])
    assert set(rows.values()) == {ledger_run.GENERATIONS}


def check(root, finished):
    """Check the run that has ended: ``finished`` are the tokens of groups that kills left in the ledger."""
    check_trained(root, BATCHES)
    found = content.read(root / "ledger")
    assert sorted(found.batches) == list(range(BATCHES))
    consumed = [key for number in range(BATCHES) for key in found.batches[number].groups]
    assert max(Counter(consumed).values()) == 1 and len(consumed) == BATCHES * GROUPS
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


@MODES  # which files can go differs: a synchronous group is needed for one batch
def test_old_files_go_and_every_kept_checkpoint_can_be_resumed(start, tmp_path, partial):
    """Runs that keep one or two checkpoints are killed up to three times; a copy goes on from each checkpoint.

    A batch that was trained on before the kill must be trained on again with the same tokens.
    """
    rng, batches, resumed = random.Random(2), 12, 0
    # The first kill of the first run leaves a finished group of the batch after a checkpoint. This checkpoint is still
    # kept at the second kill, and a resume from it needs the group.
    runs = [[("fsync", 15, True), ("poll", 30, True)]]
    runs += [[("poll", rng.randint(5, 40), rng.random() < 0.5) for _ in range(3)] for _ in range(2)]
    for number, kills in enumerate(runs):
        words = [batches, 2 - number % 2]
        root = tmp_path / f"run {number}"
        (root / "ledger").mkdir(parents=True)
        for kill in kills:
            if start(root, partial, kill, words) == 0:
                break
            for place, kept in enumerate(ledger_run.checkpoints(root)):
                copy = tmp_path / f"from {kept.name}, {resumed}"
                shutil.copytree(root, copy)
                for newer in ledger_run.checkpoints(copy)[place + 1 :]:
                    shutil.rmtree(newer)
                assert start(copy, partial, words=words) == 0
                check_trained(copy, batches)
                resumed += 1
        assert start(root, partial, words=words) == 0
        check_trained(root, batches)
        found, oldest = content.read(root / "ledger"), batches - ledger_run.SAVE_EVERY
        assert min(found.batches) >= oldest  # there are some even if only the last checkpoint is kept: the newest file
        # A group that began K batches before the checkpoint can be needed, and lies in a file with groups that ended
        # since the checkpoint before it, and had begun K batches before that.
        more = 2 * ledger_run.STALENESS + ledger_run.SAVE_EVERY if partial else 0
        assert min(key.birth for key in found.groups) >= oldest - more
    assert resumed > 4
