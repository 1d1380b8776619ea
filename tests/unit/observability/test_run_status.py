"""status.json: what a run does now, and the sentence about it."""

import json
import math
import os
import time
from dataclasses import replace

import pytest

from megatron_grpo.observability.metrics import MetricsLogger
from megatron_grpo.observability.run_status import StatusFile, duration, mark_stopped, read_status, state_in_words
from megatron_grpo.observability.watchdog import State, waits_in_words
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils import progress
from megatron_grpo.utils.arguments import replaced

RUNNING = {"state": "running", "phase": "rollout", "phase_seconds": 3.0, "quiet_seconds": 0.1, "waits": "", "age": 0.5}


def until(condition):
    while not condition():
        time.sleep(0.01)


def test_the_file_follows_the_phases_and_ends_with_the_state(tmp_path):
    status = StatusFile(tmp_path, lambda: {"update": 3, "total": 9, "rollout": None})
    with progress.phase("update"):
        progress.step("backward")
        until(lambda: read_status(tmp_path)["phase"] == "update: backward")
        found = read_status(tmp_path)
        assert (found["state"], found["update"], found["total"], found["pid"]) == ("running", 3, 9, os.getpid())
        assert found["age"] < 60
    status.close("finished")
    assert read_status(tmp_path)["state"] == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]  # no temporary file


def test_a_run_that_a_signal_has_ended_says_so_and_no_other_run(tmp_path):
    mark_stopped(tmp_path, 7, "SIGKILL ended rank 1")  # there is no file
    assert read_status(tmp_path) is None
    for state, pid, expected in (("finished", 7, "finished"), ("running", 8, "running"), ("running", 7, "stopped")):
        (tmp_path / "status.json").write_text(json.dumps({"state": state, "pid": pid, "update": 3, "error": ""}))
        mark_stopped(tmp_path, 7, "SIGKILL ended rank 1")
        status = read_status(tmp_path)
        assert (status["state"], status["update"]) == (expected, 3)
        assert status["error"] == ("SIGKILL ended rank 1" if expected == "stopped" else "")
    said = state_in_words(status, 3, 5, 0.0)
    assert said == {"state": "stopped", "text": "stopped: update 3 of 5: SIGKILL ended rank 1"}


def test_a_folder_that_is_deleted_does_not_end_the_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    status = StatusFile(folder, dict)
    (folder / "status.json").unlink()
    folder.rmdir()
    status.close("finished")
    assert read_status(folder) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 99999, "\udcff"])
def test_a_damaged_file_is_none(tmp_path, text):
    (tmp_path / "status.json").write_text(text, errors="surrogateescape")
    assert read_status(tmp_path) is None


def test_a_logger_says_finished_or_stopped(tmp_path):
    for last, state in ((2, "finished"), (1, "stopped")):
        args = replaced(parse_args(["--save", str(tmp_path / state)]), world_size=1)
        logger = MetricsLogger(args, 0, 2, 0)
        for i in range(1, last + 1):
            logger.log(i, {"lr": 0.1})
        logger.close()
        found = json.loads((tmp_path / state / "status.json").read_text())
        assert (found["state"], found["update"], found["total"]) == (state, last, 2)


def test_an_error_of_the_run_ends_it_as_stopped_with_its_findings(tmp_path, capsys):
    """`entry_point.run` calls `end` after an error, which leaves no time for `close`; after `close` it does nothing."""
    args = replaced(parse_args(["--save", str(tmp_path)]), world_size=1)
    logger = MetricsLogger(args, 0, 12, 0)
    for i in range(1, 7):
        logger.log(i, {"lr": 0.1, "completion/truncated": 0.5})
    logger.end()
    assert read_status(tmp_path)["state"] == "stopped"
    assert "What went wrong, first:" in capsys.readouterr().out
    logger.close()
    assert "What went wrong" not in capsys.readouterr().out


def test_the_findings_are_printed_at_the_end_of_a_run_and_of_a_resumed_one(tmp_path, capsys):
    args = replaced(parse_args(["--save", str(tmp_path)]), world_size=1)
    for start, stop in ((0, 6), (6, 12)):
        logger = MetricsLogger(args, 0, 12, start)
        for i in range(start + 1, stop + 1):
            logger.log(i, {"lr": 0.1, "completion/truncated": 0.5})
        logger.close()
        out = capsys.readouterr().out
        assert out.count("What went wrong, first:") == 1
        assert "since update 1: completion/truncated: 50% of the completions are truncated" in out


@pytest.mark.parametrize(
    ("changes", "state", "text"),
    [
        ({}, "running", "update 57 of 120: rollout for 4 s"),
        (
            {"rollout": {"finished": 12, "running": 52, "tokens": 3456}},
            "running",
            "update 57 of 120: rollout for 4 s; 12 of 64 completions, 3,456 tokens",
        ),
        ({"waits": "rank 1 in 'x' for rank 0 in 'y'"}, "running", "rollout for 4 s; waiting: rank 1 in 'x' for"),
        ({"quiet_seconds": 200.0}, "running", "no sign of progress for 3 min"),
        ({"age": 600.0}, "silent", "silent for 10 min: update 57 of 120, last in 'rollout'"),
        ({"state": "finished"}, "finished", "finished: update 57 of 120"),
        ({"state": "stopped", "age": 9999.0}, "stopped", "stopped: update 57 of 120"),
        ({"state": "stopped", "error": "no room"}, "stopped", "stopped: update 57 of 120: no room"),
        ({"rollout": {"finished": math.inf, "running": math.nan}}, "running", "0 of 0 completions, 0 tokens"),
        ({"rollout": "x", "phase_seconds": None, "waits": 0}, "running", "update 57 of 120: rollout for 0 s"),
    ],
)
def test_the_sentence(changes, state, text):
    found = state_in_words(RUNNING | changes, 57, 120, 0.0)
    assert found["state"] == state and text in found["text"]


def test_a_run_without_the_file_is_judged_by_its_rows():
    assert state_in_words(None, 120, 120, 9e9)["state"] == "finished"
    assert state_in_words(None, 57, 120, 7200.0) == {
        "state": "silent",
        "text": "update 57 of 120; the last row is 2.0 h old",
    }
    assert [duration(seconds) for seconds in (119, 120, 7199, 7200)] == ["119 s", "2 min", "120 min", "2.0 h"]


def test_the_rank_that_the_others_wait_for_is_named():
    waiting = State(position="update: gradients", waits=True, entered=9, seconds=6.0)
    slow = State(position="rollout", entered=4)
    states = [waiting, waiting, slow, waiting, State(ended=True)]
    assert waits_in_words(states) == "rank 0-1, 3 in 'update: gradients' for rank 2 in 'rollout'"
    assert waits_in_words([replace(waiting, seconds=4.0), slow]) == ""  # soon over
    assert waits_in_words([slow, slow]) == "" and waits_in_words([waiting, waiting]) == ""
