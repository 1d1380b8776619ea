"""Checkpoints that megatron-core 0.16.1 wrote load, and their runs go on as 0.16.1 itself went on.

tests/data/checkpoints_of_core_0_16.tar.xz has the checkpoint of two updates in each of four layouts, the rollout, and a
JSON file for each layout in which commit 9d7b405 with megatron-core 0.16.1 resumed it: core_0_16_worker.py wrote all of
them (`record`).
"""

import json
import shutil

import pytest
from ranks import REPO

WORKER = "tests/distributed/core_0_16_worker.py"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["own", "another"])
def test_checkpoints_of_megatron_core_0_16_are_resumed_as_by_itself(layout, tmp_path, torchrun):
    """In the layout that wrote it, and in another one: these moves do not depend on who wrote the checkpoint."""
    shutil.unpack_archive(REPO / "tests/data/checkpoints_of_core_0_16.tar.xz", tmp_path)
    out = torchrun(2, WORKER, "resume", tmp_path, layout).stdout
    results = [json.loads(line.removeprefix("found ")) for line in out.splitlines() if line.startswith("found ")]
    assert len(results) == 4 and all((tmp_path / name / f"{layout}.json").exists() for name, layout, _ in results)
    for name, layout, got in results:
        want = json.loads((tmp_path / name / f"{layout}.json").read_text())
        # Weights, float32 copies and moments bit for bit, position, schedule and steps of Adam.
        assert {**got, "update": 0, "weights": 0} == {**want, "update": 0, "weights": 0}, (name, layout)
        near = 1e-2 if name == "data_parallel" else 1e-4  # it has bf16, whose rounding depends on the processor
        assert got["update"] == pytest.approx(want["update"], rel=near, abs=near), (name, layout)
        assert got["weights"].keys() == want["weights"].keys()
        for key, numbers in want["weights"].items():
            assert got["weights"][key] == pytest.approx(numbers, rel=near, abs=near), (name, layout, key)
