"""Attention under tensor and context parallelism; attention_worker.py has the checks."""

from pathlib import Path

import pytest


@pytest.mark.distributed
def test_context_and_tensor_parallel(torchrun, tmp_path):
    """TP 2 with CP 2, and CP 4, equal one process, gradients included; sinks go from checkpoint to checkpoint."""
    torchrun(4, Path(__file__).with_name("attention_worker.py"), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
