"""The dry run's counts of every rank against models that are built."""

import json

import pytest
from dry_run_worker import LAYOUTS


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("which", ["few", "others"])
def test_ranks_hold_what_is_built(which, torchrun, tmp_path):
    torchrun(4, "tests/distributed/dry_run_worker.py", tmp_path / "results.json", which)
    layouts = json.loads((tmp_path / "results.json").read_text())
    assert len(layouts) == len(LAYOUTS[which])
    for results in layouts:
        for rank, result in enumerate(results):
            assert result["built"] == result["expected"], (rank, result["layout"])
            assert result["layers"] == result["expected layers"], (rank, result["layout"])
        # Shards of the optimizer are cut at round numbers, so they differ a little between ranks; none is lost.
        numbers = sum(result["optimizer"] for result in results)
        assert numbers == pytest.approx(sum(result["expected optimizer"] for result in results)), results[0]["layout"]
