"""Packed attention against a plain masked softmax in float64: values and gradients of q, k, v and sinks."""

import math

import numpy as np
import pytest
import torch
from attention_worker import NAMES, Alone, Case, module_results, plain, reference, results

# attention_worker installs the CPU layer, which comes before megatron.core.
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.data.pack import SharedPrompts, _keys_of_nodes
from megatron_grpo.data.prefix_tree import PrefixTree
from megatron_grpo.models import attention as packed_attention
from megatron_grpo.models.attention import (
    PackedAttention,
    _gathered_positions,
    attend,
    blocks,
    segments,
    shared_keys,
)
from megatron_grpo.models.attention_kernels import Part, SharedKeys, Varlen
from megatron_grpo.utils.errors import GrpoError

# Of numbers in float64: the default, 1e-7, would hide a rounding to float32.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

GROUPS = ProcessGroupCollection(tp=Alone(), cp=Alone())
MIXED = (1, 9, 4, 1, 1, 12, 2)
CASES = {
    "one": Case((7,)),
    "of length one": Case((1, 1, 1)),
    "mixed": Case(MIXED),
    "equal": Case((5, 5, 5)),
    "very different": Case((200, 1, 3)),
    "one head a group": Case(MIXED, groups=4),
    "one group": Case(MIXED, groups=1),
    "scale": Case(MIXED, scale=0.7),
    "MLA": Case(MIXED, groups=4, size=24, value_size=16),
    "values larger than keys": Case(MIXED, size=8, value_size=12),
    "window of itself": Case(MIXED, left=0),
    "window 1": Case(MIXED, left=1),
    "window 5": Case(MIXED, left=5),
    "window that divides": Case((8, 4, 12), left=4),
    "window as long as the longest": Case(MIXED, left=12),
    "window one shorter": Case(MIXED, left=11),
    "window of everything": Case(MIXED, left=100),
    "window without limit": Case(MIXED, left=-1),
    "off by one": Case(MIXED, softmax="off-by-one"),
    "sinks": Case(MIXED, softmax="learnable"),
    "sinks and window": Case(MIXED, softmax="learnable", left=3),
    "soft-capped": Case(MIXED, cap=0.8),
    "soft-capped, window, scale": Case(MIXED, groups=1, cap=0.8, left=3, scale=0.9),
    "all": Case(MIXED, heads=6, size=10, value_size=7, softmax="learnable", left=5, scale=0.4),
}


def compare(got, want, tolerance=1e-12) -> None:
    assert 0 < len(got) == len(want) <= len(NAMES)
    for name, a, b in zip(NAMES, got, want, strict=False):
        torch.testing.assert_close(
            a.double(), b, atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("name", CASES)
def test_float64(name):
    case = CASES[name]
    limit = None if case.left == -1 else case.left
    compare(module_results(case, GROUPS), reference(Case(**vars(case) | {"left": limit})))


lengths = st.lists(st.one_of(st.integers(1, 12), st.integers(30, 60)), min_size=1, max_size=5).map(tuple)
shapes = {
    "heads": st.just(4),
    "groups": st.sampled_from([1, 2, 4]),
    "size": st.sampled_from([4, 6]),
    "value_size": st.sampled_from([2, 4, 8]),
    "left": st.one_of(st.none(), st.integers(0, 40)),
    "softmax": st.sampled_from(["vanilla", "off-by-one", "learnable"]),
}


@settings(max_examples=60, deadline=None)
@given(st.builds(Case, lengths=lengths, **shapes))
def test_any_case(case):
    compare(module_results(case, GROUPS), reference(case))


@pytest.mark.parametrize("name", ["mixed", "all"])
def test_float32(name):
    compare(module_results(CASES[name], GROUPS, dtype=torch.float32), reference(CASES[name], torch.float32), 1e-5)


def test_bfloat16():
    compare(module_results(CASES["all"], GROUPS, dtype=torch.bfloat16), reference(CASES["all"], torch.bfloat16), 5e-2)


@pytest.mark.parametrize("left", [None, 3])
def test_padding_and_neighbours_are_not_seen(left):
    """Whatever stands in the other sequences, even what overflows: the same output and gradients, bit for bit."""
    case = Case((6, 1, 11, 3), left=left, softmax="learnable")
    third = slice(7, 18)

    def third_of_results(fill):
        tensors, upstream = case.tensors()
        upstream[: third.start] = upstream[third.stop :] = 0.0
        if fill:
            for x in tensors[:3]:
                x.data[: third.start], x.data[third.stop :] = 1e30, -1e30
        module = case.module(GROUPS)
        module.softmax_offset.data = tensors[3].data
        got = results(
            case,
            lambda q, k, v, _: module(q, k, v, None, packed_seq_params=case.packed()),
            [*tensors[:3], module.softmax_offset],
            upstream,
        )
        return [x[third] for x in got[:4]]

    for a, b in zip(third_of_results(True), third_of_results(False), strict=True):
        assert torch.equal(a, b)


def test_sinks_take_attention_away():
    """One token whose only score is 0: with a sink of log 3 it keeps a quarter of its value, off by one a half."""
    v = torch.ones(1, 1, 4)
    for softmax, share in (("vanilla", 1.0), ("off-by-one", 0.5), ("learnable", 0.25)):
        case = Case((1,), heads=1, groups=1, size=4, value_size=4, softmax=softmax)
        module = case.module(GROUPS, torch.float32)
        if softmax == "learnable":
            module.softmax_offset.data.fill_(math.log(3))
        out = module(torch.zeros_like(v), v, v, None, packed_seq_params=case.packed())
        torch.testing.assert_close(out, torch.full((1, 4), share))


# ---- what the module takes from its configuration


def test_scale_of_the_configuration():
    """Used unless the layer gives one."""
    case = Case(MIXED, scale=0.2)
    tensors, _ = case.tensors()
    for given_scale, configured in ((None, 0.2), (0.2, 0.9)):
        config = case.config(softmax_scale=configured)
        module = PackedAttention(config, 1, None, "self", softmax_scale=given_scale, pg_collection=GROUPS)
        out = module(*tensors[:3], None, packed_seq_params=case.packed())
        torch.testing.assert_close(out, plain(case, *tensors), **EXACT)


def test_which_layers_have_a_window():
    def windows(skip):
        config = Case((1,), left=7).config(window_attn_skip_freq=skip)
        return [PackedAttention(config, layer, None, "self", pg_collection=GROUPS).left for layer in (1, 2, 3, 4)]

    assert windows(None) == [7, 7, 7, 7]
    assert windows(2) == [7, -1, 7, -1]  # every second layer sees everything, as megatron-core counts
    assert windows([0, 1, 1, 0]) == [-1, 7, 7, -1]


def test_a_window_into_the_future_is_refused():
    config = Case((1,), left=7).config()
    config.window_size = (7, 2)
    with pytest.raises(GrpoError, match=r"give \(7, 0\)"):
        PackedAttention(config, 1, None, "self", pg_collection=GROUPS)


def test_only_learnable_sinks_are_in_a_checkpoint():
    metadata = {"dp_cp_group": Alone()}
    for softmax in ("vanilla", "off-by-one"):
        module = Case((1,), softmax=softmax).module(GROUPS)
        assert not module.state_dict() and not module.sharded_state_dict(metadata=metadata)
    module = Case((1,), softmax="learnable").module(GROUPS, torch.bfloat16)
    assert [(name, x.shape, x.dtype) for name, x in module.named_parameters()] == [
        ("softmax_offset", (4,), torch.bfloat16)
    ]


# ---- memory


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives back."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("left", [None, 100, 3000])
@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
def test_memory_is_linear(left, softmax):
    """Of all tensors that pass the dispatcher none has s^2 elements: the largest is as large as q in its blocks."""
    s = 4096
    case = Case((s,), heads=2, groups=1, size=12, value_size=8, left=left, softmax=softmax)
    tensors, upstream = case.tensors(dtype=torch.float32)
    module = case.module(GROUPS, torch.float32)
    with Largest() as largest:
        module(*tensors[:3], None, packed_seq_params=case.packed()).backward(upstream)
    assert s * 2 * 12 <= largest.elements <= 2 * s * 2 * 12


# ---- the GPU's path, with plain torch in place of the flash kernels


@pytest.mark.parametrize("left", [-1, 3])
def test_flash_operations_take_these_arguments(left):
    """torch's own operations on tensors without data: the arguments fit, and the lse is [heads, t]."""
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device="meta")
    q, k = (torch.empty(9, h, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for h in (4, 2))
    sink = torch.empty(4, device="meta", requires_grad=True)
    kernel = Varlen(cu, cu, 5, 5, left, 0.3)
    assert kernel.forward(q, k, k)[1].shape == (4, 9)
    attend(q, k, k, sink, kernel).sum().backward()
    assert [x.grad.shape for x in (q, k, sink)] == [q.shape, k.shape, sink.shape]


def _stand_in(q, k, v, cu_q, cu_k, scale, left):
    """(out, lse) by the definition of flash-attn 2.1: queries and keys of a segment end together."""
    outputs, lses = [], []
    heads = q.shape[1] // k.shape[1]
    for i in range(len(cu_q) - 1):
        a = q[cu_q[i] : cu_q[i + 1]]
        b, c = (x[cu_k[i] : cu_k[i + 1]].repeat_interleave(heads, dim=1) for x in (k, v))
        at = torch.arange(len(a))[:, None] + len(b) - len(a)
        seen = (torch.arange(len(b)) <= at) & ((left < 0) | (torch.arange(len(b)) >= at - left))
        scores = torch.einsum("shd,thd->hst", a, b).mul(scale).masked_fill(~seen, -math.inf)
        lses.append(scores.logsumexp(-1))
        outputs.append(torch.einsum("hst,thd->shd", scores.softmax(-1), c))
    return torch.cat(outputs), torch.cat(lses, dim=1)


def _forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right):
    assert max_q == cu_q.diff().max() and max_k == cu_k.diff().max() and causal == (window_size_left < 0)
    assert (dropout, debug, window_size_right) == (0.0, False, 0) and cu_q.dtype == cu_k.dtype == torch.int32
    return *_stand_in(q, k, v, cu_q, cu_k, scale, window_size_left), None, None, None


def _backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *,
    scale, window_size_left, window_size_right,
):  # fmt: skip
    """Algorithm 2 of FlashAttention-2 without its tiles: p from the scores and ``lse``, the sum from ``out``."""
    assert causal == (window_size_left < 0) and window_size_right == 0
    heads = q.shape[1] // k.shape[1]
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for i in range(len(cu_q) - 1):
        one, two = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        a, b, c = q[one], k[two].repeat_interleave(heads, 1), v[two].repeat_interleave(heads, 1)
        at = torch.arange(len(a))[:, None] + len(b) - len(a)
        seen = (torch.arange(len(b)) <= at) & ((window_size_left < 0) | (torch.arange(len(b)) >= at - window_size_left))
        p = torch.exp(torch.einsum("shd,thd->hst", a, b) * scale - lse[:, one, None]) * seen
        dp = torch.einsum("shd,thd->hst", grad[one], c) - (grad[one] * out[one]).sum(-1).T[..., None]
        ds = p * dp * scale
        grads[0][one] = torch.einsum("hst,thd->shd", ds, b)
        grads[1][two] = torch.einsum("hst,shd->thd", ds, a).unflatten(1, (-1, heads)).sum(2)
        grads[2][two] = torch.einsum("hst,shd->thd", p, grad[one]).unflatten(1, (-1, heads)).sum(2)
    return tuple(grads)


@pytest.fixture(scope="module")
def flash_on_cpu():
    """The two flash operations for CPU tensors, for as long as these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten, "_flash_attention_forward", _forward)
        patch.setattr(torch.ops.aten, "_flash_attention_backward", _backward)
        yield


@settings(max_examples=60, deadline=None)
@given(
    cp_size=st.sampled_from([1, 2, 3, 4]),
    chunks=st.lists(st.one_of(st.integers(1, 3), st.integers(5, 9)), min_size=1, max_size=4),
    shape=st.fixed_dictionaries(shapes),
)
def test_gpu_layout(flash_on_cpu, cp_size, chunks, shape):
    """All ranks of a context-parallel group in one process: each its queries, all with the gathered keys."""
    case = Case(tuple(2 * cp_size * chunk for chunk in chunks), **shape)
    cu = tuple(case.packed().cu_seqlens_q.tolist())
    left, scale = -1 if case.left is None else case.left, case.size**-0.5
    gathered = torch.from_numpy(_gathered_positions(cu, cp_size))

    def attention(q, k, v, sink):
        sink = {"vanilla": None, "off-by-one": torch.zeros_like(sink), "learnable": sink}[case.softmax]
        out = torch.zeros(len(q), case.heads, case.value_size, dtype=q.dtype)
        for rank, own in enumerate(gathered.chunk(cp_size)):
            ((_, segmented, copies),) = segments(cu, cp_size, rank, torch.device("cpu"), left)
            kernel = SharedKeys([Part(slice(None), Varlen(*segmented, left, scale), copies)])
            if left < 0:
                assert len(copies.rows) <= len(q) * (1 + 1 / (2 * cp_size))
            part = attend(q[own], k[gathered], v[gathered], sink, kernel)
            out = out.index_copy(0, own, part)
        return out.flatten(1)

    compare(results(case, attention, *case.tensors()), reference(case))


@settings(max_examples=60, deadline=None)
@given(
    cp_size=st.sampled_from([1, 2, 3]),
    chunks=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5)), min_size=1, max_size=6),
    shape=st.fixed_dictionaries(shapes),
    most=st.sampled_from([0, packed_attention.MOST_COPIES]),
)
def test_shared_prompts(flash_on_cpu, cp_size, chunks, shape, most):
    """Each sequence begins anew, or goes on from the one before or its ancestor. Both kernels, all ranks."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    lengths = np.array([chunk for _, chunk in chunks]) * multiple
    cu = np.append(0, np.cumsum(lengths))
    parents, path = [], [-1]  # of depth first order, and the sequences that the next one can go on from
    for number, (choice, _) in enumerate(chunks):
        del path[choice % len(path) + 1 :]
        parents.append(path[-1])
        path.append(number)
    parent = np.array(parents)
    leaves = [number for number in range(len(parent)) if number not in parents]
    nothing = np.zeros(0, np.int64)
    keys, cu_keys = _keys_of_nodes(cu, PrefixTree(parent, nothing, lengths, nothing, nothing))
    shared = SharedPrompts(keys, cu_keys.astype(np.int32), np.arange(cu[-1]), parent, np.diff(cu_keys))
    paths = []
    for number, before in enumerate(parent.tolist()):
        paths.append((paths[before] if before >= 0 else []) + list(range(*cu[number : number + 2])))
    case = Case((int(cu[-1]),), **shape)
    offsets, left = tuple(cu.tolist()), -1 if case.left is None else case.left
    scale, gathered = case.size**-0.5, torch.from_numpy(_gathered_positions(cu, cp_size))

    def reference_attention(q, k, v, sink):
        parts = []
        for number in range(len(lengths)):
            keys = paths[number]
            alone = Case((len(keys),), **shape)
            own = len(keys) - lengths[number]
            queries = torch.cat([q.new_zeros(own, *q.shape[1:]), q[cu[number] : cu[number + 1]]])
            parts.append(plain(alone, queries, k[keys], v[keys], sink)[own:])
        return torch.cat(parts)

    def attention(kernel_of):
        def compute(q, k, v, sink):
            sink = {"vanilla": None, "off-by-one": torch.zeros_like(sink), "learnable": sink}[case.softmax]
            out = torch.zeros(len(q), case.heads, case.value_size, dtype=q.dtype)
            for rank, own in enumerate(gathered.chunk(cp_size)):
                part = attend(q[own], k[gathered], v[gathered], sink, kernel_of(rank))
                out = out.index_copy(0, own, part)
            return out.flatten(1)

        return compute

    def on_gpu(rank):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_attention, "MOST_COPIES", most)
            parts = segments.__wrapped__(offsets, cp_size, rank, torch.device("cpu"), left, shared)
        assert most or len(parts) == (2 * len(lengths) if cp_size > 1 else len(leaves))
        if cp_size == 1 and left < 0:  # an inner sequence has no copies of keys for itself
            assert sum(len(copies.rows) for _, _, copies in parts) == sum(len(paths[leaf]) for leaf in leaves)
        return SharedKeys([Part(own, Varlen(*found, left, scale), copies) for own, found, copies in parts])

    def on_cpu(rank):
        own = blocks(offsets, cp_size, rank, left, scale, shared)
        return SharedKeys([Part(slice(None), own, shared_keys(offsets, cp_size, shared))])

    want = results(case, reference_attention, *case.tensors())
    for kernel_of in (on_gpu, on_cpu):
        compare(results(case, attention(kernel_of), *case.tensors()), want)


@pytest.mark.parametrize("name", ["mixed", "sinks", "all"])
def test_gpu_without_context_parallelism(flash_on_cpu, name):
    case = CASES[name]
    packed, left = case.packed(), -1 if case.left is None else case.left
    cu, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    kernel = Varlen(cu, cu, longest, longest, left, case.scale or case.size**-0.5)

    def attention(q, k, v, sink):
        return attend(q, k, v, sink if case.softmax == "learnable" else None, kernel).flatten(1)

    compare(results(case, attention, *case.tensors()), reference(case))
