"""Tests that need a GPU: `bash tests/run_tests.sh --gpu` runs them; without a GPU each skips itself."""

import os
from pathlib import Path

import pytest
import torch

# Megatron-LM's setting of 1 makes all streams of this process wait for each other, and hides what should have waited.
os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
GPUS = torch.cuda.device_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip every test of this folder that needs more GPUs than there are (`gpus(n)`; 1 where nothing is said)."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        mark = item.get_closest_marker("gpus")
        needed = mark.args[0] if mark else 1
        if needed > GPUS:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, found {GPUS}"))
