"""--rollout-engine megatron in every layout."""

import json

import pytest
from megatron_engine_reference import by_transformers, check, toys  # noqa: F401 (a fixture)
from megatron_engine_worker import LAYOUTS
from ranks import run_torchrun


@pytest.mark.distributed
def test_layouts(toys, tmp_path):
    root, models = toys
    run_torchrun(2, "tests/distributed/megatron_engine_worker.py", root, tmp_path)
    for name, (family, _, _) in LAYOUTS.items():
        parts = [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{name}.?.json"))]
        assert len(parts) == parts[0]["replicas"] == (2 if name in ("CP2", "DP2") else 1), name
        done = {int(number): completion for part in parts for number, completion in part["done"].items()}
        check(done, by_transformers(models[family]))
