"""Weights in host memory that take the place of a model's for one pass."""

import pytest
import torch

from megatron_grpo.reference.reference_model import HostWeights


@pytest.mark.parametrize("averaged", [False, True])
def test_the_policy_of_each_pass_is_restored_bit_for_bit(averaged):
    """The second pass uses the memory of the first."""
    model = [torch.nn.BatchNorm1d(5, dtype=torch.bfloat16), torch.nn.Linear(5, 3, dtype=torch.bfloat16)]
    host = HostWeights(model, averaged)
    reference = [{name: tensor.clone() for name, tensor in chunk.state_dict().items()} for chunk in model]
    places = []
    for number in range(2):
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.data.add_(number + 1)
        model[0].num_batches_tracked += 1
        policy = [{name: tensor.clone() for name, tensor in chunk.state_dict().items()} for chunk in model]
        with host.in_place_of(model):
            assert all(torch.equal(model[i].state_dict()[n], t) for i in range(2) for n, t in reference[i].items())
        assert all(torch.equal(model[i].state_dict()[n], t) for i in range(2) for n, t in policy[i].items())
        places.append(host._policy.weights[0][0].data_ptr())
    assert places[0] == places[1] and len({w.untyped_storage().data_ptr() for c in host.weights for w in c}) == 1
    dtypes = {weight.dtype for chunk in host.weights for weight in chunk}
    assert dtypes == {torch.float32 if averaged else torch.bfloat16, torch.int64}
