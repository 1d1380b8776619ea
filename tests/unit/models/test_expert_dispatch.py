"""The dispatchers beside megatron-core's own, on one rank in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pretrain_grpo  # noqa: F401  first: it prepares for machines without a GPU

from dispatchers import results  # isort: skip
from megatron.core.transformer.moe.token_dispatcher import (  # isort: skip
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from megatron_grpo.models.expert_dispatch import (  # isort: skip
    AllGatherDispatcher,
    AllToAllDispatcher,
    sorted_by_expert,
)

# Of numbers in float64: the default, 1e-7, would hide a rounding to float32.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 99), st.floats(0, 1))
def test_all_gather_beside_megatron_core(tokens: int, experts: int, seed: int, share: float):
    """Tokens without an expert here, experts without tokens, and tokens with all of them."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator) < share
    compare(AllGatherDispatcher, MoEAllGatherTokenDispatcher, chosen, 1, generator)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 99), st.data())
def test_all_to_all_beside_megatron_core(tokens: int, experts: int, seed: int, data: st.DataObject):
    """Every token has ``topk`` experts; some experts have no token."""
    generator = torch.Generator().manual_seed(seed)
    topk = data.draw(st.integers(1, experts))
    ranks = torch.rand(tokens, experts, generator=generator).argsort(1)
    compare(AllToAllDispatcher, MoEAlltoAllTokenDispatcher, ranks < topk, topk, generator)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=1)))
def test_rows_of_several_ranks_are_sorted_by_expert_and_back(counts: list[list[int]]):
    """A row is (its expert, its rank, its number); they arrive sorted by rank."""
    rows = [(e, rank, i) for rank, sizes in enumerate(counts) for e, size in enumerate(sizes) for i in range(size)]
    received = torch.tensor(rows).view(-1, 3)
    to, back = sorted_by_expert(torch.tensor(counts), len(rows))
    assert to(received).tolist() == [list(row) for row in sorted(rows)]
    assert torch.equal(back(to(received)), received)


def compare(own: type, theirs: type, chosen: torch.Tensor, topk: int, generator: torch.Generator):
    hidden = torch.randn(len(chosen), 1, 8, generator=generator, dtype=torch.float64)
    probs = torch.rand(chosen.shape, generator=generator, dtype=torch.float64) * chosen
    for got, want in zip(*(results(kind, hidden, probs, chosen, topk) for kind in (own, theirs)), strict=True):
        torch.testing.assert_close(got, want, **EXACT)
