"""tools/benchmark/trees.py: its completions, counted by hand, and the kinds of its kernels."""

import numpy as np
import pytest

from megatron_grpo.data.pack import pack_completions
from tools import made_up
from tools.benchmark import trees

# Of a group, a group and a tree: completions, tokens of all, of a pack that shares, and in the loss. A node lacks
# its last token: every sequence after it has a copy.
OF_CASES = {
    "groups": (8, 8 * 1862, 1350 - 1 + 8 * 513, 8 * 512),
    # The prompt; of each episode seven turns without thinking, and eight turns of thinking and call, which are apart.
    "episodes": (8, 8 * 8160, 400 - 1 + 8 * (7 * 120 + 8 * 201), 8 * 8 * 200),
    # Prompt and plan; the main agent; three agents with their reports; two that each of these calls.
    "agents": (
        10,
        (1750 + 550) + 3 * (1750 + 780 + 450) + 6 * (1750 + 780 + 720),
        1750 - 1 + 551 + 3 * (780 + 451) + 6 * 721,
        500 + 3 * (180 + 250) + 6 * (120 + 200),
    ),
}


@pytest.mark.parametrize("name", OF_CASES)
def test_completions_of_a_case(name):
    batch = trees.rollout(name, trees.Text(50_000), 1)
    pack = pack_completions(batch, np.arange(batch.num_completions), share_prompts=True)
    found = batch.num_completions, batch.lengths.sum(), pack.real_lengths.sum(), batch.response_lengths.sum()
    assert found == OF_CASES[name]
    assert set(batch.prompt_lengths) == {trees.PROMPTS[name]} and (batch.group_ids == 0).all()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 64>>", "attention forward"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention backward"),
        ("kernel_cutlass_kernel_flash_fwd_sm90FlashAttentionForwardSm90_object", "attention forward"),
        ("kernel_cutlass_kernel_flash_bwd_sm90FlashAttentionBackwardSm90_object", "attention backward"),
        ("_sum_rows", "copies and sums of rows"),
        ("_heads_gradient", "norms, rotations and SwiGLU"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("Memcpy HtoD (Pinned -> Device)", "memory: copies and zeros"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdam...>", "optimizer"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert made_up.kind_of(name) == kind
