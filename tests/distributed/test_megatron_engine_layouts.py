"""--rollout-engine megatron in every layout."""

import json

import pytest
from megatron_engine_reference import by_transformers, check, toys  # noqa: F401 (a fixture)
from megatron_engine_worker import LAYOUTS
from ranks import run_torchrun

FEW = ["TP2 SP EP2", "PP2 VPP2", "CP2"]  # every dimension; CP2 has two replicas, as DP2
OTHERS = [name for name in LAYOUTS if name not in FEW]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("names", [FEW, OTHERS], ids=["few", "the others"])
def test_layouts(toys, tmp_path, names):
    root, models = toys
    expected = {name: by_transformers(models[LAYOUTS[name][0]]) for name in names}  # the first use makes a checkpoint
    run_torchrun(2, "tests/distributed/megatron_engine_worker.py", root, tmp_path, *names)
    for name in names:
        parts = [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{name}.?.json"))]
        assert len(parts) == parts[0]["replicas"] == (2 if name in ("CP2", "DP2") else 1), name
        done = {int(number): completion for part in parts for number, completion in part["done"].items()}
        check(done, expected[name])
