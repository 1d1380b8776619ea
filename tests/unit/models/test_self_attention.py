"""Queries, keys and values of a pack against the functions of megatron-core and torch that they replace."""

import pytest
import torch

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megatron_grpo.models.rope import cosines_and_sines
from megatron_grpo.models.self_attention import Norm, queries_keys_values

# Of numbers in float64: the default, 1e-7, would hide a rounding to float32.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

TOKENS, GROUPS, PER_GROUP, SIZE = 7, 2, 3, 16


@pytest.mark.parametrize("channels", [16, 8], ids=["all channels", "half of them"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_as_megatron_core_computes_them(channels, interleaved, normed):
    """The projection is split as in SelfAttention.get_query_key_value_tensors; gradients are autograd's."""
    heads = torch.randn(TOKENS, GROUPS, PER_GROUP + 2, SIZE, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(SIZE, dtype=torch.float64, requires_grad=True) for _ in range(2 * normed)]
    norms = [Norm(weight, 1e-5, False) for weight in weights] or [None, None]
    angles = torch.randn(5, 1, 1, channels // 2, dtype=torch.float64)
    freqs = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 1, 1, 2)
    rows = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    got = queries_keys_values(
        heads, *norms, *cosines_and_sines(freqs, rows, 1.5, interleaved, torch.float64), interleaved
    )

    mixed = heads.view(TOKENS, 1, GROUPS, -1)
    query, key, value = mixed.split([PER_GROUP * SIZE, SIZE, SIZE], dim=3)
    query = query.reshape(TOKENS, 1, -1, SIZE)
    if normed:
        query, key = (
            torch.nn.functional.rms_norm(x, (SIZE,), weight, 1e-5)
            for x, weight in zip((query, key), weights, strict=True)
        )
    kind = {"rotary_interleaved": interleaved, "mscale": 1.5}
    want = *(_apply_rotary_pos_emb_bshd(x, freqs[rows], **kind)[:, 0] for x in (query, key)), value[:, 0]

    factors = [torch.randn_like(x) for x in want]
    inputs = [heads, *weights]
    gradients = [
        torch.autograd.grad([(x * f).sum() for x, f in zip(parts, factors, strict=True)], inputs)
        for parts in (got, want)
    ]
    torch.testing.assert_close(got, want, **EXACT)
    torch.testing.assert_close(*gradients, **EXACT)
