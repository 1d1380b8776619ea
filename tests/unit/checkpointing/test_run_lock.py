"""One run at a time writes to --save; a run that has ended, however, does not stand in the way of the next."""

import json
import os
import shutil
import signal
import threading

import pytest
from lock_holder import Holder

from megatron_grpo.checkpointing import run_lock
from megatron_grpo.checkpointing.run_lock import NAME, RunLock
from megatron_grpo.utils.errors import GrpoError


def test_a_second_run_is_refused_and_named_the_first(tmp_path):
    with Holder(tmp_path) as first, Holder(tmp_path) as second:
        assert first.answer == "held"
        assert f"is in use by the run of process {first.process.pid} on " in second.answer
        assert second.process.wait() == 1


@pytest.mark.parametrize("killed", [True, False])
def test_the_next_run_follows_at_once(tmp_path, killed):
    with Holder(tmp_path) as first:
        first.end(killed=killed)
    with Holder(tmp_path) as second:
        process = first.process.pid
        assert second.answer.startswith("held")
        assert (f"taken over from the run of process {process} on " in second.answer) == killed


def test_of_runs_that_start_together_one_gets_the_directory(tmp_path):
    holders = []
    threads = [threading.Thread(target=lambda: holders.append(Holder(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(holder.answer == "held" for holder in holders) == [False, False, False, True]
    for holder in holders:
        holder.end(killed=True)


def elsewhere(tmp_path, monkeypatch):
    """Make locks of files say nothing, and this process one of another host."""
    monkeypatch.setattr(run_lock, "_kernel", lambda: "another host")
    monkeypatch.setattr(run_lock.fcntl, "lockf", lambda *_: None)


def test_a_lease_of_another_host_is_watched_not_compared(tmp_path, monkeypatch):
    elsewhere(tmp_path, monkeypatch)
    with Holder(tmp_path) as first:
        with pytest.raises(GrpoError, match=f"is in use by the run of process {first.process.pid} on "):
            RunLock(tmp_path, lease=30.0)
        first.process.send_signal(signal.SIGSTOP)  # its host is gone, say
        os.waitid(os.P_PID, first.process.pid, os.WSTOPPED | os.WNOWAIT)  # its threads run on for a moment
        lock = RunLock(tmp_path, lease=0.4)
        assert f"taken over from the run of process {first.process.pid} on " in lock.taken_over
        lock.release()


def test_a_run_that_lost_its_lease_knows(tmp_path, monkeypatch):
    """It was stopped, and another host took over: it must write no more."""
    first = RunLock(tmp_path, beat=1000)
    elsewhere(tmp_path, monkeypatch)
    second = RunLock(tmp_path, lease=0.1)
    assert "has taken it over" in first.taken_by()
    first.release()
    assert second.taken_by() is None and not second.deleted()
    second.release()
    assert not (tmp_path / NAME).exists()


def test_a_deleted_directory_is_noticed(tmp_path):
    lock = RunLock(tmp_path / "save")
    assert not lock.deleted()
    shutil.rmtree(tmp_path / "save")
    assert lock.deleted()
    lock.take_again()
    assert not lock.deleted()
    with Holder(tmp_path / "save") as other:
        assert "is in use by" in other.answer
    lock.release()


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"run": "x"}), "\0" * 9])
def test_whatever_a_killed_host_left_is_taken_over(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    lock = RunLock(tmp_path, lease=0.05)
    assert bool(lock.taken_over) == bool(text)
    lock.release()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(GrpoError, match="cannot be locked"):
        RunLock(tmp_path / "file" / "save")
    assert os.listdir(tmp_path) == ["file"]
