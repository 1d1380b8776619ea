"""Processes that wait for files of other ranks: how often they ask the file server, which 1,024 ranks may share."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_grpo.checkpointing import background, background_writer, data_files
from megatron_grpo.checkpointing.background import BackgroundSaves
from megatron_grpo.checkpointing.background_writer import Job, Part

SECONDS = 60.0  # that the slowest rank takes to write its part


@pytest.fixture
def asked(monkeypatch):
    """Paths whose existence was asked for, by a clock that only waiting moves; ``at`` has what happens at a time."""
    found = SimpleNamespace(paths=[], now=0.0, at=[])
    real = Path.exists

    def exists(path):
        found.paths.append(path)
        return real(path)

    def sleep(seconds):
        found.now += seconds
        for due in [event for event in found.at if event[0] <= found.now]:
            found.at.remove(due)
            due[1]()

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: found.now)
    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr(background_writer, "time", clock)
    monkeypatch.setattr(background, "time", clock)
    return found


def test_a_rank_answers_when_its_part_is_written(tmp_path, asked):
    """It does not wait until the directory is renamed: rank 0 answers for all."""
    asked.at.append((SECONDS, tmp_path.rmdir))
    background_writer._write(Job(tmp_path), [])
    assert asked.paths == [] and asked.now == 0.0


def test_rank_0_asks_a_few_times_a_second(tmp_path, asked, monkeypatch):
    file = tmp_path / data_files.file_name(0)
    written = background_writer.listing(file)
    asked.at.append((SECONDS, lambda: written.write_text(json.dumps({"items": []}))))
    monkeypatch.setattr(data_files, "Writer", lambda directory: SimpleNamespace(finish=lambda metadata, results: None))
    background_writer._describe(Part(file, []))
    assert asked.now >= SECONDS and not written.exists()
    assert len(asked.paths) < 5 * SECONDS  # two questions each time, and more often in the first seconds


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_ends_asks_seldom_whether_the_save_is_published(tmp_path, asked, ends):
    """``settle``, and the save of a run that has lost its engine: no other rank may answer there."""
    temporary = tmp_path / "iter_0000001.tmp"
    temporary.mkdir()
    saves = BackgroundSaves.__new__(BackgroundSaves)
    saves.job = Job(temporary)

    def written(timeout):
        saves.job = None  # this rank's part

    saves.written = written
    if ends:
        asked.at.append((SECONDS / 2, temporary.rmdir))
    saves.settle()
    assert temporary.exists() is not ends
    assert SECONDS / 2 <= asked.now <= SECONDS / (1 + ends) + 1
    assert len(asked.paths) < 3 * SECONDS
