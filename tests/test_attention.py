"""Packed attention against a plain masked softmax, one sequence at a time, in float64: values and gradients."""

import math

import pytest
import torch

from megatron_grpo import cpu_backend

cpu_backend.install()

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.models.attention import PackedAttention, _padded_dense
from megatron_grpo.models.gpt import packed_seq_params

DIM = 16
PACKS = {
    "one": [7],
    "of length one": [1, 1, 1],
    "mixed": [1, 9, 4, 1, 1, 12, 2],
    "equal": [5, 5, 5],
    "with padding": [6, 1, 11, 3],  # a last sequence of zeros, as RolloutBatch.pack adds it
}


def problem(lengths: list[int], heads: int, groups: int, dtype=torch.float64):
    """q, k, v of a pack, the upstream gradient, and the description of the pack."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), n, DIM) for n in (heads, groups, groups, heads)]
    q, k, v, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return q, k, v, upstream, packed_seq_params(cu_seqlens, max(lengths), "local")


def plain(q, k, v, lengths: list[int], scale: float) -> torch.Tensor:
    """softmax(q k^T scale) v with every sequence by itself, every query head with its own copy of keys and values."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    outputs = []
    for sequence in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        a, b, c = (x.transpose(0, 1) for x in sequence)  # [heads, s, d]
        scores = scale * a @ b.transpose(1, 2)
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        outputs.append((scores.masked_fill(future, -math.inf).softmax(-1) @ c).transpose(0, 1))
    return torch.cat(outputs)


def results(attend, q, k, v, upstream) -> list[torch.Tensor]:
    """Values, and gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def check(lengths, heads, groups, scale, dtype, tolerance) -> None:
    *inputs, packed = problem(lengths, heads, groups, dtype)
    got = results(lambda q, k, v: _padded_dense(q, k, v, packed, scale), *inputs)
    exact = [x.double() for x in inputs]
    want = results(lambda q, k, v: plain(q, k, v, lengths, scale or DIM**-0.5), *exact)
    for name, a, b in zip(("output", "d q", "d k", "d v"), got, want, strict=True):
        torch.testing.assert_close(
            a.double(), b, atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("pack", PACKS)
def test_float64(pack, heads, groups):
    check(PACKS[pack], heads, groups, None, torch.float64, 1e-12)


def test_scale():
    check(PACKS["mixed"], 4, 2, 0.7, torch.float64, 1e-12)


def test_float32():
    check(PACKS["mixed"], 4, 2, None, torch.float32, 1e-5)


def test_padding_and_neighbours_are_not_seen():
    """Whatever stands in the other sequences, even what overflows: the same output and gradients, bit for bit."""
    lengths = PACKS["with padding"]
    q, k, v, upstream, packed = problem(lengths, 4, 2)
    third = slice(sum(lengths[:2]), sum(lengths[:3]))
    upstream[: third.start] = upstream[third.stop :] = 0.0
    want = results(lambda *x: _padded_dense(*x, packed, None), q, k, v, upstream)
    for x in (q, k, v):
        x[: third.start], x[third.stop :] = 1e30, -1e30
    got = results(lambda *x: _padded_dense(*x, packed, None), q, k, v, upstream)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[third], b[third])


def test_module():
    """What megatron-core calls: heads are joined, and the scale is that of the layer spec."""
    config = TransformerConfig(
        num_layers=1, hidden_size=4 * DIM, num_attention_heads=4, num_query_groups=2, cuda_graph_scope=[]
    )
    lengths = PACKS["mixed"]
    q, k, v, _, packed = problem(lengths, 4, 2)
    for scale in (None, 0.5):
        module = PackedAttention(config, 1, None, "self", softmax_scale=scale)
        out = module(q, k, v, None, packed_seq_params=packed)
        torch.testing.assert_close(out, plain(q, k, v, lengths, scale or DIM**-0.5).flatten(1), atol=1e-12, rtol=1e-12)
