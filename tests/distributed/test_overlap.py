"""--overlap-param-gather fetches new weights as late as in the next forward pass: nobody may read the old ones."""

import re

import pytest


@pytest.mark.slow
@pytest.mark.distributed
def test_engine_checkpoint_and_reference_have_the_newest_weights(tmp_path, torchrun):
    """Through the program's own calls, and the same with ``parameters_complete`` taken out of them, which is found."""
    out = torchrun(2, "tests/distributed/overlap_worker.py", tmp_path).stdout
    assert out.count("nobody reads a stale weight") == 2, out
    stale = re.findall(r"^stale without care: (.*)$", out, re.MULTILINE)
    assert len(stale) == 2, out
    for names in stale:
        assert {"engine", "checkpoint", "after the reference", "after the reference of a replay"} <= set(
            names.split(", ")
        ), stale
