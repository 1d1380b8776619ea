"""Memory that is not there any more when the trainer's tensors come back."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_grpo.training.offload import Offloader, optimizer_tensors, weight_tensors
from megatron_grpo.utils.errors import GrpoError


def test_memory_that_somebody_has_taken():
    offloader = Offloader([], None, weights=True, gradients=False, optimizer_state=False)
    storage = mock.Mock(**{"resize_.side_effect": torch.OutOfMemoryError("CUDA out of memory")})
    offloader.is_out, offloader._copied = True, [(storage, 3 * 2**30)]
    with pytest.raises(GrpoError, match=r"3.00 GiB .* inference server .* --load"):
        offloader.to_device()


def test_tensors_in_8_bits_are_the_tensors_inside_them():
    class Wrapper(torch.Tensor):  # as Transformer Engine's: without memory of its own
        def get_data_tensors(self):
            return self.values, None

    moment = torch.Tensor._make_subclass(Wrapper, torch.empty(4, device="meta"))
    moment.values = torch.zeros(4, dtype=torch.uint8)
    weight, plain = torch.zeros(4), torch.zeros(4)
    state = {weight: {"exp_avg": moment, "exp_avg_sq": plain, "step": 3}}
    inner = SimpleNamespace(param_groups=[{"params": [weight]}], state=state)
    found = list(optimizer_tensors(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])))
    assert [id(tensor) for tensor in found] == [id(weight), id(moment.values), id(plain)]
    chunk = SimpleNamespace(bucket_groups=[], expert_parallel_bucket_groups=[], parameters=lambda: [moment, weight])
    assert [id(tensor) for tensor in weight_tensors([chunk])] == [id(moment.values), id(weight)]
