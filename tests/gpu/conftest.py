"""Tests that need a GPU: `bash tests/run_tests.sh --gpu` runs them. A case that lacks what it needs skips itself."""

import os
from pathlib import Path

import pytest
import torch

from megatron_grpo.utils.packages import missing, package_names

# Megatron-LM's setting of 1 makes all streams of this process wait for each other, and hides what should have waited.
os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
GPUS = torch.cuda.device_count()


def lacking(item: pytest.Item) -> str | None:
    """Return what a case of this folder needs and this machine lacks: GPUs (1 where nothing is said), packages."""
    mark = item.get_closest_marker("gpus")
    needed = mark.args[0] if mark else 1
    if needed > GPUS:
        return f"{needed} GPU{'s' * (needed > 1)}, found {GPUS}"
    for mark in item.iter_markers("needs"):
        absent = missing(*mark.args)
        if absent:
            return f"{package_names(absent)}, not installed"
        lowest = mark.kwargs.get("capability", (0, 0))
        found = torch.cuda.get_device_capability()
        if found < lowest:
            return f"a GPU of compute capability {lowest[0]}.{lowest[1]}, found {found[0]}.{found[1]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the cases of this folder that lack something."""
    here = str(Path(__file__).parent) + os.sep
    for item in items:
        if str(item.path).startswith(here) and (what := lacking(item)):
            item.add_marker(pytest.mark.skip(reason=f"needs {what}"))
