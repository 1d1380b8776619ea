"""Gradients that an embedding adds to megatron-core's buffer."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.models.weight_gradients import add_rows


@given(st.integers(1, 6), st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_values_of_equal_rows_are_added(size, drawn):
    rows = torch.tensor([row % size for row in drawn])
    values = torch.randn(len(rows), 3).bfloat16()
    total = torch.randn(size, 3)
    want = total.double().index_add(0, rows, values.double())
    add_rows(total, rows, values)
    torch.testing.assert_close(total.double(), want, rtol=1e-6, atol=2e-6)
