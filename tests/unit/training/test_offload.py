"""Memory that is not there any more when the trainer's tensors come back."""

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
