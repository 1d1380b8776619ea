"""Copies of a tensor's rows: keys that several segments of queries see, tokens that go to several experts.

The sums over the copies of a row are exact to float32 and the same in every run. torch's ``index_add`` and
``scatter_add`` add in the precision of the tensor, on GPUs in an order that varies.
"""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowCopies:
    """Copy i is that of row ``rows[i]``, int64 ``[k]``, of a tensor with ``count`` rows."""

    rows: torch.Tensor
    count: int

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Return the copies ``[k, ...]`` of the rows of ``x`` ``[t, ...]``."""
        return x.index_select(0, self.rows)

    def sum(self, copies: torch.Tensor) -> torch.Tensor:
        """Return the sum ``[t, ...]`` of the ``copies`` ``[k, ...]`` of each row, summed in at least float32."""
        if copies.is_cuda:
            from megatron_grpo.models.gpu_kernels import sum_rows  # Triton exists with a GPU only

            return sum_rows(copies, *self._by_row)
        dtype = torch.promote_types(copies.dtype, torch.float32)
        sums = copies.new_zeros(self.count, *copies.shape[1:], dtype=dtype)
        return sums.index_add_(0, self.rows, copies.to(dtype)).to(copies.dtype)

    @functools.cached_property
    def _by_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The copies sorted by their row, int64 ``[k]``, and where those of each row begin, ``[t + 1]``."""
        rows, order = self.rows.sort(stable=True)
        return order, torch.searchsorted(rows, torch.arange(self.count + 1, device=rows.device))
