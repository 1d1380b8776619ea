"""Mamba-2's recurrence over packs against single tokens, and against transformers."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from transformers.models.nemotron_h.modeling_nemotron_h import Zamba2RMSNormGated, mamba2_chunk_scan

from megatron_grpo.data.pack import SharedPrompts
from megatron_grpo.models import recurrence
from megatron_grpo.models.mamba import gated_group_norm, mamba, state_space
from megatron_grpo.models.recurrence import State, of_pack

# Of numbers in float64: the default, 1e-7, would hide a rounding to float32.
EXACT = {"rtol": 1e-11, "atol": 1e-11}

GROUPS, HEADS, STATE, SIZE = 2, 3, 5, 4  # heads of each group
MIXED = HEADS * SIZE + 2 * STATE
# A token, less than a chunk, exactly two chunks, an empty sequence, and more than three chunks.
LENGTHS = [1, 7, 16, 0, 29]
CU = (0, *np.cumsum(LENGTHS).tolist())

pytestmark = pytest.mark.usefixtures("small_chunks")


def inputs(tokens: int, seed: int = 0, dtype=torch.float64) -> Any:
    """x, b, c and steps of made-up tokens, and the rates of all heads."""
    torch.manual_seed(seed)
    x = torch.randn(tokens, GROUPS, HEADS, SIZE, dtype=dtype)
    b, c = (torch.randn(tokens, GROUPS, STATE, dtype=dtype) for _ in range(2))
    return x, b, c, torch.rand(tokens, GROUPS, HEADS, dtype=dtype), -3 * torch.rand(GROUPS, HEADS, dtype=dtype)


def one_by_one(x, b, c, steps, rate, state):
    """The recurrence of arXiv 2405.21060, one token and one head after another, for a single sequence."""
    outs = []
    for t in range(len(x)):
        state = torch.stack(
            [
                (steps[t, a, r] * rate[a, r]).exp() * state[a, r] + steps[t, a, r] * torch.outer(b[t, a], x[t, a, r])
                for a in range(GROUPS)
                for r in range(HEADS)
            ]
        ).view(GROUPS, HEADS, STATE, SIZE)
        outs.append(torch.einsum("ardp,ad->arp", state, c[t]))
    return (torch.stack(outs) if outs else x), state


def test_packed_sequences_are_single_recurrences():
    *tensors, rate = [x.requires_grad_() for x in inputs(CU[-1])]
    before = torch.randn(len(LENGTHS), GROUPS, HEADS, STATE, SIZE, dtype=torch.float64, requires_grad=True)
    got = state_space(*tensors, rate, CU, before)
    singles = [one_by_one(*(x[i:j] for x in tensors), rate, before[n]) for n, (i, j) in enumerate(pairwise(CU))]
    want = torch.cat([out for out, _ in singles]), torch.stack([state for _, state in singles])
    torch.testing.assert_close(got, want, **EXACT)
    factors = [torch.randn_like(x) for x in want]
    gradients = [
        torch.autograd.grad([(x * f).sum() for x, f in zip(both, factors, strict=True)], [*tensors, rate, before])
        for both in (got, want)
    ]
    torch.testing.assert_close(*gradients, **EXACT)


def test_as_transformers_computes_it():
    """In float32, with chunks of 64 tokens, for sequences of 200 tokens."""
    recurrence.CHUNK = 64
    x, b, c, steps, rate = inputs(400, seed=1, dtype=torch.float32)
    got, state = state_space(x, b, c, steps, rate, (0, 200, 400))
    of_heads = x.flatten(1, 2), steps.flatten(1), b, c
    x, steps, b, c = (tensor.unflatten(0, (2, 200)) for tensor in of_heads)
    out, last = mamba2_chunk_scan(x, steps, rate.flatten(), b, c, 64, return_final_states=True)
    torch.testing.assert_close(got.flatten(1, 2), out.flatten(0, 1), atol=5e-5, rtol=3e-5)
    torch.testing.assert_close(state.flatten(1, 2).mT, last, atol=4e-6, rtol=2e-6)


def test_the_norm_is_transformers():
    torch.manual_seed(2)
    theirs = Zamba2RMSNormGated(GROUPS * HEADS * SIZE, group_size=HEADS * SIZE, eps=1e-5)
    theirs.weight.data.normal_()
    out, gates = torch.randn(2, 9, GROUPS, HEADS, SIZE)
    weight = theirs.weight.view(GROUPS, HEADS, SIZE)
    got = gated_group_norm(out, gates, weight, 1e-5)
    torch.testing.assert_close(got.flatten(1), theirs(out.flatten(1), gates.flatten(1)))


def test_no_tokens_give_empty_outputs_with_gradients():
    tensors = [x.requires_grad_() for x in inputs(0)]
    out, state = state_space(*tensors, (0,))
    assert out.shape == (0, GROUPS, HEADS, SIZE) and state.shape == (0, GROUPS, HEADS, STATE, SIZE)
    assert all(gradient is not None for gradient in torch.autograd.grad(out.sum(), tensors))


def layer(tokens: int) -> Any:
    """Mixed and steps of made-up tokens, and the parameters of a layer: weight, bias, rate and skip."""
    torch.manual_seed(3)
    exact = {"dtype": torch.float64, "requires_grad": True}
    steps, rate = inputs(tokens)[-2:]
    shapes = (GROUPS, MIXED, 4), (GROUPS, MIXED)
    parameters = [*(torch.randn(shape, **exact) for shape in shapes), rate.requires_grad_()]
    mixed = torch.randn(tokens, GROUPS, MIXED, **exact)
    return [mixed, steps.requires_grad_(), *parameters, torch.randn(GROUPS, HEADS, **exact)]


def test_sequences_go_on_from_each_level_of_a_tree():
    """The paths 0, 0 1, 0 2, 0 2 3, 0 2 4 and 5 as whole sequences, with all gradients."""
    lengths, paths = [5, 7, 3, 1, 9, 4], [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4], [5]]
    cu = (0, *np.cumsum(lengths).tolist())
    keys = [np.concatenate([np.arange(cu[n], cu[n + 1]) for n in path]) for path in paths]
    cu_keys = np.append(0, np.cumsum([len(key) for key in keys])).astype(np.int32)
    parent = np.array([path[-2] if len(path) > 1 else -1 for path in paths])
    shared = SharedPrompts(np.concatenate(keys), cu_keys, np.zeros(cu[-1], np.int64), parent, np.diff(cu_keys))
    everything = mixed, steps, *parameters = layer(cu[-1])
    got = of_pack(lambda own, cu, before: mamba(*own, *parameters, STATE, cu, before), (mixed, steps), cu, shared)
    parts = []
    for key, length in zip(keys, lengths, strict=True):
        rows = torch.from_numpy(key)
        parts.append(mamba(mixed[rows], steps[rows], *parameters, STATE, (0, len(rows)))[0][-length:])
    want = torch.cat(parts)
    torch.testing.assert_close(got, want, **EXACT)
    gradients = [torch.autograd.grad(out.square().sum(), everything) for out in (got, want)]
    torch.testing.assert_close(*gradients, **EXACT)


def test_a_sequence_in_two_parts_is_the_whole_one():
    """The state after the first part is all that the second one needs."""
    mixed, steps, *parameters = layer(23)
    whole, end = mamba(mixed, steps, *parameters, STATE, (0, 23))
    a, state = mamba(mixed[:10], steps[:10], *parameters, STATE, (0, 10))
    b, last = mamba(mixed[10:], steps[10:], *parameters, STATE, (0, 13), State(*state))
    torch.testing.assert_close(torch.cat((a, b)), whole, **EXACT)
    torch.testing.assert_close(last, end, **EXACT)
