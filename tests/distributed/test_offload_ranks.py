"""Updates with the trainer's tensors away in between are those without, to the last bit."""

import pytest
from offload_worker import CASES

# Each kind of optimizer state, of gradients and of buffers once.
FEW = ["float32", "bf16 gradients", "bf16 overlapped", "experts"]
OTHERS = [name for name in CASES if name not in FEW]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "names", [FEW, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few cases", "the other cases"]
)
def test_updates_and_checkpoints_do_not_notice_an_absence(names, tmp_path, tiny_models, torchrun):
    """The worker asserts; here each of its cases must have come to its end on both ranks."""
    output = torchrun(2, "tests/distributed/offload_worker.py", tiny_models["qwen3"], tmp_path, *names).stdout
    assert output.count("equal: ") == 2 * len(names), output
