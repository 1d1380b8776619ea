"""Triton's kernels of models and of the weight sync, without a GPU."""

import pytest

triton = pytest.importorskip("triton")

from torch.nn.attention.flex_attention import FlexKernelOptions

from megatron_grpo.models import gpu_kernels, softcap
from megatron_grpo.models.exact import kernels as exact_kernels
from megatron_grpo.rollout.weight_sync import kernels as sync_kernels

COUNTS = {gpu_kernels: {"tokens", "rows"}, exact_kernels: {"tokens", "rows", "sequences"}}
COUNTS[sync_kernels] = {"height", "pieces"}


@pytest.mark.parametrize(("module", "names"), COUNTS.items())
def test_no_kernel_is_compiled_for_a_number_of_tokens(module, names):
    """Triton would compile it again for 1 and for multiples of 16, while all ranks wait."""
    kernels = [found for found in vars(module).values() if isinstance(found, triton.runtime.JITFunction)]
    counts = [(kernel, one) for kernel in kernels for one in kernel.params if one.name in names]
    assert {one.name for _, one in counts if not one.is_constexpr} == names
    for kernel, one in counts:
        assert one.is_constexpr or one.do_not_specialize, f"{kernel.__name__}: {one.name}"


KIB = 1024
GPUS = {"RTX 4090": 99, "H200": 227}  # KiB of shared memory that a block can have, by NVIDIA's programming guide


@pytest.mark.parametrize("gpu", GPUS)
def test_soft_capped_attention_fits_a_gpu(gpu):
    """Tiles of queries, and of keys and values for each stage, of heads of 512 channels in bf16."""
    options = softcap.kernel_options(512, GPUS[gpu] * KIB)
    known = [kind + name for kind in ("", "fwd_", "bwd_") for name in FlexKernelOptions.__annotations__]
    assert options.keys() <= set(known)  # inductor ignores other names
    rows, columns = options.get("fwd_BLOCK_M", 64), options.get("fwd_BLOCK_N", 32)  # torch's: 64 and 32
    assert (rows + 2 * columns * options["fwd_num_stages"]) * 512 * 2 <= GPUS[gpu] * KIB


def test_torch_chooses_the_blocks_of_smaller_heads_where_they_fit():
    assert softcap.kernel_options(256, GPUS["H200"] * KIB) == softcap.kernel_options(64, 99 * KIB)
    assert "bwd_BLOCK_M1" in softcap.kernel_options(256, 99 * KIB)
