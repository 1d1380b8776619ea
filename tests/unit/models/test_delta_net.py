"""The gated delta rule and its convolution against a recurrence of single tokens, and against transformers."""

import re
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from megatron_grpo.data.pack import SharedPrompts
from megatron_grpo.models import delta_net, recurrence
from megatron_grpo.models.delta_net import gated_delta_rule, unit_length
from megatron_grpo.models.recurrence import State, causal_convolution, of_pack

# Of numbers in float64: the default, 1e-7, would hide a rounding to float32.
EXACT = {"rtol": 1e-11, "atol": 1e-11}

KEY_HEADS, VALUES, KEY, VALUE = 2, 3, 5, 4
# A token, less than a chunk, exactly two chunks, an empty sequence, and more than three chunks.
LENGTHS = [1, 7, 16, 0, 29]
CU = (0, *np.cumsum(LENGTHS).tolist())

pytestmark = pytest.mark.usefixtures("small_chunks")


def delta_net_of_pack(qkv, weight, log_decay, beta, key_size, cu_seqlens, shared):
    def compute(tokens, offsets, before):
        return delta_net.delta_net(tokens[0], weight, *tokens[1:], key_size, offsets, before)

    return of_pack(compute, (qkv, log_decay, beta), cu_seqlens, shared)


def inputs(tokens: int, seed: int = 0, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, log decays and betas of made-up tokens; keys have unit length, as the rule needs."""
    torch.manual_seed(seed)
    q, k = (unit_length(torch.randn(tokens, KEY_HEADS, KEY, dtype=dtype)) for _ in range(2))
    v = torch.randn(tokens, KEY_HEADS, VALUES, VALUE, dtype=dtype)
    log_decay = -3 * torch.rand(tokens, KEY_HEADS, VALUES, dtype=dtype)
    beta = torch.rand(tokens, KEY_HEADS, VALUES, dtype=dtype)
    return q, k, v, log_decay, beta


def one_by_one(q, k, v, log_decay, beta, state=None):
    """The rule as arXiv 2412.06464 writes it, one token and one head after another, for a single sequence."""
    state = torch.zeros(KEY_HEADS, VALUES, KEY, VALUE, dtype=v.dtype) if state is None else state
    outs = []
    for t in range(len(v)):
        rows = []
        for a in range(KEY_HEADS):
            for r in range(VALUES):
                key, alpha = k[t, a], log_decay[t, a, r].exp()
                forget = torch.eye(KEY, dtype=v.dtype) - beta[t, a, r] * torch.outer(key, key)
                rows.append(alpha * forget @ state[a, r] + beta[t, a, r] * torch.outer(key, v[t, a, r]))
        state = torch.stack(rows).view(KEY_HEADS, VALUES, KEY, VALUE)
        outs.append(torch.einsum("arkv,ak->arv", state, q[t, :] / KEY**0.5))
    return (torch.stack(outs) if outs else v), state


def test_packed_sequences_are_single_recurrences():
    tensors = [x.requires_grad_() for x in inputs(CU[-1])]
    before = torch.randn(len(LENGTHS), KEY_HEADS, VALUES, KEY, VALUE, dtype=torch.float64, requires_grad=True)
    got = gated_delta_rule(*tensors, CU, before)
    singles = [
        one_by_one(*(x[begin:end] for x in tensors), before[number]) for number, (begin, end) in enumerate(pairwise(CU))
    ]
    want = torch.cat([out for out, _ in singles]), torch.stack([state for _, state in singles])
    torch.testing.assert_close(got, want, **EXACT)
    factors = [torch.randn_like(x) for x in want]
    gradients = [
        torch.autograd.grad([(x * f).sum() for x, f in zip(both, factors, strict=True)], [*tensors, before])
        for both in (got, want)
    ]
    torch.testing.assert_close(*gradients, **EXACT)


@pytest.mark.slow
def test_gradients_of_the_rule():
    before = torch.randn(2, KEY_HEADS, VALUES, KEY, VALUE, dtype=torch.float64)
    tensors = [x.requires_grad_() for x in (*inputs(11), before)]
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x[:-1], (0, 2, 11), x[-1]), tensors)


def test_as_transformers_computes_it():
    """Both of its functions, in float32, with chunks of 64 tokens, for sequences of 200 tokens of strong decay."""
    recurrence.CHUNK = 64
    tensors = inputs(400, seed=1, dtype=torch.float32)
    got, state = gated_delta_rule(*tensors, (0, 200, 400))
    q, k, v, log_decay, beta = tensors
    heads = q.repeat_interleave(VALUES, 1), k.repeat_interleave(VALUES, 1), v.flatten(1, 2)
    batch = [x.view(2, 200, *x.shape[1:]) for x in (*heads, log_decay.flatten(1), beta.flatten(1))]
    for function in (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule):
        out, last = function(*batch, output_final_state=True)
        torch.testing.assert_close(got.flatten(1, 2), out.flatten(0, 1), atol=6e-6, rtol=3e-5)
        torch.testing.assert_close(state.flatten(1, 2), last, atol=2e-6, rtol=1e-5)


def test_cost_is_linear_in_the_length():
    """Twice the tokens need twice the products: no product is over the whole sequence."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(tokens):
        with FlopCounterMode(display=False) as counter:
            gated_delta_rule(*inputs(tokens), (0, tokens))
        return counter.get_total_flops()

    assert flops(512) == 2 * flops(256)


def test_no_tokens_give_empty_outputs_with_gradients():
    tensors = [x.requires_grad_() for x in inputs(0)]
    out, state = gated_delta_rule(*tensors, (0,))
    assert out.shape == (0, KEY_HEADS, VALUES, VALUE) and state.shape == (0, KEY_HEADS, VALUES, KEY, VALUE)
    assert all(gradient is not None for gradient in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution_of_packed_sequences(width):
    """torch's convolution of each sequence with its earlier inputs before it."""
    torch.manual_seed(2)
    x = torch.randn(CU[-1], 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, width, dtype=torch.float64, requires_grad=True)
    before = torch.randn(len(LENGTHS), width - 1, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    got, last = causal_convolution(x, weight, CU, before, bias)
    longer = [torch.cat((before[n], x[CU[n] : CU[n + 1]])) for n in range(len(LENGTHS))]
    want = [
        torch.nn.functional.conv1d(part.T[None], weight[:, None], bias, groups=6)[0].T
        for part in longer
        if len(part) >= width
    ]
    torch.testing.assert_close(got, torch.cat(want), **EXACT)
    torch.testing.assert_close(last, torch.stack([part[len(part) - width + 1 :] for part in longer]), **EXACT)
    gradients = [torch.autograd.grad(out.square().sum(), [x, weight, before, bias]) for out in (got, torch.cat(want))]
    torch.testing.assert_close(*gradients, **EXACT)


def test_convolution_without_earlier_inputs_begins_with_zeros():
    x, weight = torch.randn(5, 3), torch.randn(3, 4)
    zeros = torch.zeros(2, 3, 3)
    torch.testing.assert_close(
        causal_convolution(x, weight, (0, 1, 5)), causal_convolution(x, weight, (0, 1, 5), zeros)
    )


def test_completions_go_on_from_a_shared_prompt():
    """As whole sequences, each with its own copy of the prompt; the prompt in the pack has padding behind it."""
    torch.manual_seed(3)
    width, channels = 4, 2 * KEY + VALUES * VALUE
    prompt, own, alone, padding = 9, (6, 13), 10, 3
    lengths = [prompt + padding, *own, alone]
    cu = (0, *np.cumsum(lengths).tolist())
    prompt_tokens = np.arange(prompt)
    keys = [np.arange(cu[1])]
    keys += [np.concatenate((prompt_tokens, np.arange(cu[n], cu[n + 1]))) for n in (1, 2)]
    keys.append(np.arange(cu[3], cu[4]))
    cu_keys = np.append(0, np.cumsum([len(key) for key in keys])).astype(np.int32)
    parent, path_lengths = np.array([-1, 0, 0, -1]), np.diff(cu_keys)
    shared = SharedPrompts(np.concatenate(keys), cu_keys, np.zeros(cu[-1], np.int64), parent, path_lengths)
    qkv = torch.randn(cu[-1], KEY_HEADS, channels, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(KEY_HEADS, channels, width, dtype=torch.float64, requires_grad=True)
    log_decay = (-torch.rand(cu[-1], KEY_HEADS, VALUES, dtype=torch.float64)).requires_grad_()
    beta = torch.rand(cu[-1], KEY_HEADS, VALUES, dtype=torch.float64, requires_grad=True)
    everything = [qkv, weight, log_decay, beta]
    got = delta_net_of_pack(*everything, KEY, cu, shared)

    whole = [np.arange(prompt), *keys[1:]]
    offsets = (0, *np.cumsum([len(tokens) for tokens in whole]).tolist())
    rows = torch.from_numpy(np.concatenate(whole))
    separate = delta_net_of_pack(qkv[rows], weight, log_decay[rows], beta[rows], KEY, offsets, None)
    kept = np.concatenate(
        [np.arange(prompt)]
        + [np.arange(prompt, len(tokens)) + at for tokens, at in zip(whole[1:3], offsets[1:3], strict=True)]
        + [np.arange(offsets[3], offsets[4])]
    )
    mine = np.delete(np.arange(cu[-1]), np.arange(prompt, prompt + padding))
    torch.testing.assert_close(got[mine], separate[kept], **EXACT)
    gradients = [torch.autograd.grad(out.square().sum(), everything) for out in (got[mine], separate[kept])]
    torch.testing.assert_close(*gradients, **EXACT)


def test_sequences_go_on_from_each_level_of_a_tree():
    """The paths 0, 0 1, 0 2, 0 2 3, 0 2 4 and 5 as whole sequences; the first four have children or siblings."""
    torch.manual_seed(5)
    lengths, paths = [5, 7, 3, 1, 9, 4], [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4], [5]]
    cu, channels = (0, *np.cumsum(lengths).tolist()), 2 * KEY + VALUES * VALUE
    keys = [np.concatenate([np.arange(cu[n], cu[n + 1]) for n in path]) for path in paths]
    cu_keys = np.append(0, np.cumsum([len(key) for key in keys])).astype(np.int32)
    parent = np.array([path[-2] if len(path) > 1 else -1 for path in paths])
    shared = SharedPrompts(np.concatenate(keys), cu_keys, np.zeros(cu[-1], np.int64), parent, np.diff(cu_keys))
    qkv = torch.randn(cu[-1], KEY_HEADS, channels, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(KEY_HEADS, channels, 4, dtype=torch.float64, requires_grad=True)
    log_decay = (-torch.rand(cu[-1], KEY_HEADS, VALUES, dtype=torch.float64)).requires_grad_()
    beta = torch.rand(cu[-1], KEY_HEADS, VALUES, dtype=torch.float64, requires_grad=True)
    everything = [qkv, weight, log_decay, beta]
    got = delta_net_of_pack(*everything, KEY, cu, shared)
    parts = []
    for key, length in zip(keys, lengths, strict=True):
        rows = torch.from_numpy(key)
        own = qkv[rows], weight, log_decay[rows], beta[rows]
        parts.append(delta_net.delta_net(*own, KEY, (0, len(rows)))[0][-length:])
    want = torch.cat(parts)
    torch.testing.assert_close(got, want, **EXACT)
    gradients = [torch.autograd.grad(out.square().sum(), everything) for out in (got, want)]
    torch.testing.assert_close(*gradients, **EXACT)


def test_a_sequence_in_two_parts_is_the_whole_one():
    """The state after the first part is all that the second one needs."""
    torch.manual_seed(4)
    tokens, first, channels = 23, 10, 2 * KEY + VALUES * VALUE
    qkv = torch.randn(tokens, KEY_HEADS, channels, dtype=torch.float64)
    weight = torch.randn(KEY_HEADS, channels, 4, dtype=torch.float64)
    *_, log_decay, beta = inputs(tokens)
    whole, end = delta_net.delta_net(qkv, weight, log_decay, beta, KEY, (0, tokens))
    a, state = delta_net.delta_net(qkv[:first], weight, log_decay[:first], beta[:first], KEY, (0, first))
    b, last = delta_net.delta_net(
        qkv[first:], weight, log_decay[first:], beta[first:], KEY, (0, tokens - first), State(*state)
    )
    torch.testing.assert_close(torch.cat((a, b)), whole, **EXACT)
    torch.testing.assert_close(last, end, **EXACT)


@pytest.mark.parametrize(
    ("gpu", "fla", "dtype", "triton", "said"),
    [
        (False, True, torch.bfloat16, "3.7.1", "plain torch"),
        (True, False, torch.bfloat16, "3.7.1", "plain torch"),
        (True, True, torch.float32, "3.7.1", "plain torch"),
        (True, True, torch.bfloat16, "3.7.1", "flash-linear-attention"),
        (True, True, torch.bfloat16, "3.5.0", "flash-linear-attention .* and plain torch .*"),
    ],
)
def test_the_log_says_what_computes_delta_nets(monkeypatch, gpu, fla, dtype, triton, said):
    """On a Hopper GPU, with and without packages."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(delta_net, "find_spec", lambda name: "found" if fla and name == "fla" else None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    cached = delta_net._has_kernels, delta_net._rule_has_kernel
    for function in cached:
        function.cache_clear()
    try:
        assert re.fullmatch(said, delta_net.kernels(dtype))
    finally:
        for function in cached:
            function.cache_clear()
