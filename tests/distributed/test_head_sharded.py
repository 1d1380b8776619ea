"""The head, and divergences from a teacher, at TP 2 and 4."""

import pytest
from slow import slow_except


@pytest.mark.distributed
@pytest.mark.parametrize("world", slow_except([2], [2, 4]))
def test_sharded_vocabulary(torchrun, world):
    torchrun(world, "tests/distributed/head_worker.py")


@pytest.mark.distributed
@pytest.mark.parametrize("world", slow_except([2], [2, 4]))
def test_divergences(torchrun, world):
    torchrun(world, "tests/distributed/divergence_worker.py")
