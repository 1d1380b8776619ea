"""Updates with the trainer's tensors away in between are those without, to the last bit."""

from unittest import mock

import pytest
import torch

from megatron_grpo.training.offload import Offloader
from megatron_grpo.utils.errors import GrpoError


def test_memory_that_somebody_has_taken():
    offloader = Offloader([], None, weights=True, gradients=False, optimizer_state=False)
    storage = mock.Mock(**{"resize_.side_effect": torch.OutOfMemoryError("CUDA out of memory")})
    offloader.is_out, offloader._copied = True, [(storage, 3 * 2**30)]
    with pytest.raises(GrpoError, match=r"3.00 GiB .* inference server .* --load"):
        offloader.to_device()


@pytest.mark.distributed
def test_updates_and_checkpoints_do_not_notice_an_absence(tmp_path, tiny_models, torchrun):
    """The worker asserts; here each of its cases must have come to its end on both ranks."""
    output = torchrun(2, "tests/offload_worker.py", tiny_models["qwen3"], tmp_path).stdout
    assert output.count("equal: ") == 2 * 9, output
