"""Damage to a checkpoint: found when it is loaded, by name, with a message and no traceback."""

import pytest


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("one_in", [7, 1])  # 7: each kind, on other files
def test_no_damage_loads(tmp_path, torchrun, one_in):
    """Over 100 kinds of damage to each file, to the directory and to the run's folder; and 40 bits drawn at random."""
    lines = torchrun(1, "tests/distributed/damage_worker.py", tmp_path, one_in).stdout.splitlines()
    kinds = [line for line in lines if line.startswith(("found |", "NOT FOUND |"))]
    assert [line for line in kinds if line.startswith("NOT")] == []
    assert len(kinds) > 150 // one_in
    assert "Traceback" not in "\n".join(lines)
