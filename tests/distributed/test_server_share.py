"""Servers' completions are received and scored by several ranks: equal batches, whoever receives them."""

import pytest
from ranks import run_torchrun

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_batches_do_not_depend_on_who_receives(tmp_path, ranks):
    """Also when a server is lost during the rollout and comes back for the next."""
    done = run_torchrun(ranks, "tests/distributed/server_share_worker.py", tmp_path)
    assert done.stdout.count(f"equal for 1 and {ranks} receivers") == ranks
