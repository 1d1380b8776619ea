"""Updates with functions over lists of tensors are those with megatron-core's loops, to the last bit."""

import pytest
from multi_tensor_worker import CASES

# Copies of weights in 16 bits, megatron-core's two optimizers of them, and gradients with a loss scale.
FEW = ["bf16", "bf16 overlapped", "fp16"]
OTHERS = [name for name in CASES if name not in FEW]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("names", [FEW, OTHERS], ids=["few cases", "the other cases"])
def test_updates_are_those_of_megatron_core(names, torchrun):
    """The worker compares all tensors of model and optimizer; here each of its cases must have come to its end."""
    output = torchrun(2, "tests/distributed/multi_tensor_worker.py", *names).stdout
    assert all(output.count(f"equal: {name} on rank") == 2 for name in names), output
