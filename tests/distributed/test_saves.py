"""Saves in the background, and saves that fail; save_worker.py has the checks."""

import re

import pytest

WORKER = "tests/distributed/save_worker.py"


@pytest.mark.slow
@pytest.mark.distributed
def test_saves_in_the_background(tmp_path, torchrun):
    """One is that of the foreground; those that fail leave the earlier checkpoint."""
    out = torchrun(2, WORKER, "background", tmp_path, timeout=300).stdout
    assert out.count("background: all tensors equal") == out.count("loaded") == 2, out
    for rank in range(2):
        assert f"killed on rank {rank}: checkpoint " in out, out
        assert f"deleted on rank {rank}: checkpoint " in out, out
        assert re.search(rf"rank 0 with 100 bytes on rank {rank}: .* rank 0: .*File too large", out), out
        assert re.search(rf"rank 1 with 100 bytes on rank {rank}: .* rank 1: .*File too large", out), out
        assert re.search(rf"rank 1 with 0 bytes on rank {rank}: .* rank 1: it could write neither", out), out
        assert f"rank 0 killed on rank {rank}: checkpoint " in out, out
    assert out.count("the process that writes it ended (exit status -9)") == 4, out
    assert out.count("saved after failures") == 2


@pytest.mark.distributed
def test_a_save_that_fails_leaves_the_earlier_checkpoint(tmp_path, torchrun):
    out = torchrun(2, WORKER, "failures", tmp_path, timeout=300).stdout
    for rank in range(2):
        assert f"estimate on rank {rank}: checkpoint " in out, out
        assert f"full on rank {rank}: checkpoint " in out, out
        assert f"common on rank {rank}: checkpoint " in out, out
    assert out.count("the disk is full: it needs 0.000 GB, and 0.000 GB are free") == 2
    assert out.count("rank 1: [Errno 28] No space left on device") == 2
    assert out.count("saved after failures") == 2
