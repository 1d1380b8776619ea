"""Experts in several layouts, and their checkpoints; experts_worker.py has the checks."""

import pytest


@pytest.mark.distributed
def test_layouts_and_checkpoints(tmp_path, torchrun):
    out = torchrun(2, "tests/distributed/experts_worker.py", tmp_path).stdout
    for line in ("parts agree", "weights moved", "optimizer moved"):
        assert out.count(line) == 2, out
