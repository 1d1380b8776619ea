"""Experts in several layouts, and their checkpoints; experts_worker.py has the checks."""

import pytest


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("words", "loads"), [([], 16), (["--every-pair"], 44)], ids=["few", "all"])
def test_layouts_and_checkpoints(words, loads, tmp_path, torchrun):
    """By default each layout is saved from and loaded into, by either kind, but not each pair of layouts."""
    out = torchrun(2, "tests/distributed/experts_worker.py", tmp_path, *words).stdout
    for line in ("parts agree", f"weights moved {loads} times", "optimizer moved"):
        assert out.count(line) == 2, out
