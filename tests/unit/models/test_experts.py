"""GroupedExperts against megatron-core's SequentialMLP: values and gradients, and on two ranks also checkpoints."""

import pytest
import torch
import torch.distributed as dist
from experts_worker import EXPERTS, GPT_OSS, HIDDEN, KINDS, build, make_config, problem, run, stacked

# experts_worker installs the CPU layer, which comes before megatron.core.
# isort: split
from megatron.core import parallel_state

from megatron_grpo.models.experts import GroupedExperts
from megatron_grpo.utils.errors import GrpoError

COUNTS = {
    "uneven": [3, 1, 8, 2],
    "none for some": [0, 5, 0, 7],
    "one token": [0, 0, 0, 1],
    "none at all": [0, 0, 0, 0],
}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def check(config, inputs, tolerance: float) -> None:
    sequential, grouped = (build(kind, config) for kind in KINDS)
    want, got = (run(experts, *inputs) for experts in (sequential, grouped))
    for name in want:
        assert (got[name] - want[name]).norm() <= tolerance * want[name].norm(), name
    idle = inputs[1] == 0
    for name in list(want)[3:]:
        assert not got[name][idle].any() and got[name][~idle].any() == (~idle).any()


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_values_and_gradients(counts, dtype, tolerance):
    check(make_config(dtype, bf16=dtype == torch.bfloat16), problem(counts, dtype), tolerance)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_biases_and_the_clamped_activation(counts, dtype, tolerance):
    check(make_config(dtype, bf16=dtype == torch.bfloat16, **GPT_OSS), problem(counts, dtype), tolerance)


def test_fused_activation():
    check(make_config(bias_activation_fusion=True), problem([3, 0, 8, 2]), 1e-6)


def test_a_gradient_without_strides():
    """That of a sum is one number, repeated: the grouped product takes no such matrix."""
    tokens, counts, probs, _ = problem([3, 0, 8, 2])
    check(make_config(), (tokens, counts, probs, torch.ones(1, 1).expand_as(tokens)), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_gives_the_weights_that_it_gives_there(dtype):
    sequential, grouped = (stacked(build(kind, make_config(dtype, bf16=dtype == torch.bfloat16))) for kind in KINDS)
    for want, got in zip(sequential, grouped, strict=True):
        assert torch.equal(got, want)
        assert got.dtype == dtype and len(got.unique(dim=0)) == EXPERTS


def test_refusals():
    with pytest.raises(
        GrpoError, match=r"16 bytes, 8 elements, .*-size is 16 and .* is 12: leave out --moe-grouped-gemm"
    ):
        build(GroupedExperts, make_config(torch.bfloat16, ffn=12, bf16=True))
    with pytest.raises(GrpoError, match="4 elements, but --hidden-size is 18 "):
        build(GroupedExperts, make_config(hidden=HIDDEN + 2))
    with pytest.raises(GrpoError, match="singleton_local_shards"):
        build(GroupedExperts, make_config()).sharded_state_dict(metadata={"singleton_local_shards": True})
