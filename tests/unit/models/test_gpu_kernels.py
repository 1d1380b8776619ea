"""Triton's kernels of models and of the weight sync, without a GPU."""

import pytest

triton = pytest.importorskip("triton")

from megatron_grpo.models import gpu_kernels
from megatron_grpo.models.exact import kernels as exact_kernels
from megatron_grpo.rollout.weight_sync import checksum_kernels

COUNTS = {gpu_kernels: {"tokens", "rows"}, exact_kernels: {"tokens", "rows", "sequences"}}
COUNTS[checksum_kernels] = {"height", "pieces"}


@pytest.mark.parametrize(("module", "names"), COUNTS.items())
def test_no_kernel_is_compiled_for_a_number_of_tokens(module, names):
    """Triton would compile it again for 1 and for multiples of 16, while all ranks wait."""
    kernels = [found for found in vars(module).values() if isinstance(found, triton.runtime.JITFunction)]
    counts = [(kernel, one) for kernel in kernels for one in kernel.params if one.name in names]
    assert {one.name for _, one in counts if not one.is_constexpr} == names
    for kernel, one in counts:
        assert one.is_constexpr or one.do_not_specialize, f"{kernel.__name__}: {one.name}"
