"""Updates with the trainer's tensors away in between are those without, to the last bit."""

import pytest


@pytest.mark.distributed
def test_updates_and_checkpoints_do_not_notice_an_absence(tmp_path, tiny_models, torchrun):
    """The worker asserts; here each of its cases must have come to its end on both ranks."""
    output = torchrun(2, "tests/distributed/offload_worker.py", tiny_models["qwen3"], tmp_path).stdout
    assert output.count("equal: ") == 2 * 9, output
