"""Weights over NCCL, in the packed form that vLLM's servers take."""

import pytest
from launch import torchrun


@pytest.mark.gpus(2)
def test_packed_weights_arrive():
    """The worker asserts; here it must have come to the end, three times."""
    output = torchrun(2, "tests/gpu/nccl_worker.py", env={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    assert output.count("received ") == 3, output
