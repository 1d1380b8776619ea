"""The groups of ranks that share a pack are the neighbours to which `hybrid_schedule` gives it."""

import pytest

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), [(1, 4, 2, 1), (2, 4, 1, 2), (1, 8, 2, 2), (1, 4, 3, 1)])
def test_hybrid_groups_are_blocks_of_a_context_parallel_group(monkeypatch, order, tp, cp, dp, pp):
    monkeypatch.setattr(parallel_state, "create_group", lambda ranks, **_: ranks)
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    of_context = {rank: group for group in generator.get_ranks("cp") for rank in group}
    for ranks in generator.get_ranks("dp-cp"):
        for rank in ranks:
            groups = parallel_state.create_hybrid_dp_cp_groups(rank, ranks, None)
            own = of_context[rank]
            for degree in (2**power for power in range(1, cp.bit_length() - 1)):
                first = own.index(rank) // degree * degree
                assert groups[degree] == own[first : first + degree]
