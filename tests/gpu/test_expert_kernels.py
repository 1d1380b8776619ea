"""Experts in one grouped product, and their dispatchers, against megatron-core's, in bf16."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.xdist_group("experts")

import torch.distributed as dist
from dispatchers import results
from experts_worker import KINDS, build, make_config, problem, run, stacked
from megatron.core import parallel_state
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from megatron_grpo.models.expert_dispatch import AllGatherDispatcher, AllToAllDispatcher
from megatron_grpo.models.router import Float32Logits

EXPERTS, HIDDEN, TOKENS, CHOSEN = 32, 2048, 8192, 8


@pytest.fixture(scope="module")
def world():
    """A process group of this process alone, on its GPU."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def routed() -> list[int]:
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    return scores.topk(CHOSEN).indices.flatten().bincount(minlength=EXPERTS).tolist()


COUNTS = {"routed": routed(), "uneven": [0, 1, 7, 3000, 0, 513] + [0] * (EXPERTS - 7) + [65], "none": [0] * EXPERTS}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", COUNTS)
def test_grouped_experts(world, fused, name):
    counts = COUNTS[name]
    options = {"experts": EXPERTS, "hidden": HIDDEN, "ffn": 768, "bf16": True, "bias_activation_fusion": fused}
    sequential, grouped = (build(kind, make_config(torch.bfloat16, **options)) for kind in KINDS)
    for a, b in zip(stacked(sequential), stacked(grouped), strict=True):
        assert torch.equal(a, b), "one seed, two initial weights"
    inputs = problem(counts, torch.bfloat16, HIDDEN, "cuda")
    want, got = (run(kind, *inputs) for kind in (sequential, grouped))
    gaps = {key: float((got[key] - want[key]).norm() / want[key].norm().clamp(1e-9)) for key in want}
    assert all(gap < 1e-2 for gap in gaps.values()), gaps  # `max` passes over NaN
    idle = torch.tensor(counts) == 0
    assert not got["d weight1"][idle].any() and not got["d weight2"][idle].any()


def test_float32_logits_of_the_router():
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, HIDDEN, device="cuda").bfloat16() for rows in (TOKENS, 128))
    leaves = [tensor.requires_grad_() for tensor in (x, weight)]
    upstream = torch.randn(TOKENS, 128, device="cuda") * 1e-6
    logits = Float32Logits.apply(*leaves)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    want = exact[0] @ exact[1].T
    assert float((logits - want).norm() / want.norm()) < 1e-5
    for got, right in zip(
        torch.autograd.grad(logits, leaves, upstream), torch.autograd.grad(want, exact, upstream.double()), strict=True
    ):
        assert float((got.double() - right).norm() / right.norm()) < 2**-8


@pytest.mark.parametrize(
    "own, theirs",
    [(AllGatherDispatcher, MoEAllGatherTokenDispatcher), (AllToAllDispatcher, MoEAlltoAllTokenDispatcher)],
)
def test_dispatchers(world, own, theirs):
    """One rank; megatron-core's are given float64, because their sums in bf16 are less exact."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, 1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    scores = torch.rand(TOKENS, EXPERTS, device="cuda")
    chosen = torch.zeros(TOKENS, EXPERTS, device="cuda", dtype=torch.bool).scatter(1, scores.topk(CHOSEN).indices, True)
    got = results(own, hidden, (scores * chosen).bfloat16(), chosen, CHOSEN)
    want = results(theirs, hidden.double(), (scores * chosen).bfloat16().double(), chosen, CHOSEN)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and float((a.double() - b).norm() / b.double().norm()) < 1e-2
