"""Updates with functions over lists of tensors are those with megatron-core's loops, to the last bit."""

import pytest
from multi_tensor_worker import CASES


@pytest.mark.distributed
def test_updates_are_those_of_megatron_core(torchrun):
    """The worker compares all tensors of model and optimizer; here each of its cases must have come to its end."""
    output = torchrun(2, "tests/distributed/multi_tensor_worker.py").stdout
    assert all(output.count(f"equal: {name} on rank") == 2 for name in CASES), output
