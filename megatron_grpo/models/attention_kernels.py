"""Attention over packed sequences by the device's flash kernel, with sliding windows and sinks, in linear memory.

A kernel has two functions: forward returns the output and the logarithm of the softmax's denominator (lse); backward
returns the gradients of q, k and v, given output and lse. Results of several calls are combined from their outputs o
and their lse l, without the scores:

* A sink is one more logit s per head that has no value: lse' = log(e^l + e^s), out' = o e^(l - lse').
* Two disjoint sets of keys: lse' = log(e^l1 + e^l2), out' = o1 e^(l1 - lse') + o2 e^(l2 - lse').

The backward pass of flash attention recomputes the probabilities as p = e^(score - lse), and d score =
p (d p - sum(d out * out)) (Dao 2023, FlashAttention-2, algorithm 2). Called with lse' and out' it therefore returns the
gradients of the combined output through the keys of this call.
"""

import functools
import importlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from megatron_grpo.models.row_copies import RowCopies


class Kernel(Protocol):
    """Interface of kernels: q and out are ``[t_q, heads, d]``, k and v ``[t_k, groups, d]``, lse ``[heads, t_q]``."""

    def forward(self, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse)."""

    def backward(self, grad, q, k, v, out, lse) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v for d out = ``grad``."""


class Attention(torch.autograd.Function):
    """Attention with sinks: ``apply(q, k, v, sink, kernel)`` returns out ``[t_q, heads, d]``.

    ``sink`` is one logit per head, ``[heads]``, or None.
    """

    @staticmethod
    def forward(ctx, q, k, v, sink, kernel: Kernel):
        out, lse = kernel.forward(q, k, v)
        if sink is not None:
            logit = sink.to(lse.dtype)[:, None]
            out = (out * torch.sigmoid(lse - logit).T[..., None]).to(out.dtype)
            lse = torch.logaddexp(lse, logit)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, sink, out, lse = ctx.saved_tensors
        grad_sink = None
        if sink is not None:  # a sink's value is 0, so p (d p - sum(d out * out)) reduces to the second term
            share = torch.exp(sink.to(lse.dtype)[:, None] - lse)
            grad_sink = -(share * (grad.to(lse.dtype) * out).sum(-1).T).sum(1).to(sink.dtype)
        return *ctx.kernel.backward(grad, q, k, v, out, lse), grad_sink, None


@dataclass(frozen=True)
class Varlen:
    """CUDA kernel: one call over ragged segments of queries, each with its own segment of keys.

    Calls the operators of ``torch.nn.attention.varlen``, because the function of that module does not pass the lse to
    the backward pass. If a segment has more keys than queries, their ends are aligned (bottom-right alignment,
    flash-attn's README on version 2.1).
    """

    cu_queries: torch.Tensor  # int32 [n + 1]
    cu_keys: torch.Tensor  # int32 [n + 1]
    longest_queries: int
    longest_keys: int
    left: int  # size of the sliding window: earlier tokens that a token sees besides itself; -1: all
    scale: float

    def _arguments(self) -> tuple[tuple, dict]:
        lengths = self.cu_queries, self.cu_keys, self.longest_queries, self.longest_keys
        window = {"scale": self.scale, "window_size_left": self.left, "window_size_right": 0}
        return (*lengths, 0.0, self.left < 0), window  # no dropout; causal

    def forward(self, q, k, v):
        positional, named = self._arguments()
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *positional, False, **named)
        return out, lse

    def backward(self, grad, q, k, v, out, lse):
        positional, named = self._arguments()
        state = (
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, device=q.device),
        )  # the state of the dropout, unused
        return torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *positional, *state, **named)


FLASH_ATTENTION_4 = ("vllm", "cutlass", "quack")  # its kernels lie in vLLM's wheel, which needs the others for them


@functools.cache
def flash_attention_4() -> ModuleType:
    """Return the module of FlashAttention 4 in vLLM's wheel; ImportError without a GPU or without its packages."""
    # CUTLASS warns of an argument that these kernels do not use, at each compilation.
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
    return importlib.import_module("vllm.vllm_flash_attn.cute.interface")


@dataclass(frozen=True)
class FlashAttention4(Varlen):
    """`Varlen` with the kernels of FlashAttention 4, which are made for Hopper and Blackwell GPUs.

    The two passes are called, because the package's function with gradients does not pass the lse to the backward pass.
    """

    def _keywords(self) -> dict:
        left, right = (None, None) if self.left < 0 else (self.left, 0)
        return {
            "softmax_scale": self.scale,
            "causal": self.left < 0,
            "window_size_left": left,
            "window_size_right": right,
            "cu_seqlens_q": self.cu_queries,
            "cu_seqlens_k": self.cu_keys,
            "max_seqlen_q": self.longest_queries,
            "max_seqlen_k": self.longest_keys,
        }

    def forward(self, q, k, v):
        out, lse, *_ = flash_attention_4()._flash_attn_fwd(q, k, v, return_lse=True, **self._keywords())
        return out, lse

    def backward(self, grad, q, k, v, out, lse):
        reproducible = torch.are_deterministic_algorithms_enabled()
        backward = flash_attention_4()._flash_attn_bwd
        return backward(q, k, v, out, grad, lse, **self._keywords(), deterministic=reproducible)


class Part(NamedTuple):
    """Queries of `SharedKeys` that one call computes."""

    queries: slice
    kernel: Kernel
    copies: RowCopies  # their keys, of all


@dataclass(frozen=True)
class SharedKeys:
    """`Kernel` in which several segments of queries attend to the same keys and values.

    Autograd keeps each key and value once: the copies for a part live during its call only. The parts follow each other
    and have all queries. The gradients of keys and values are summed over parts in at least float32.
    """

    parts: Sequence[Part]

    def forward(self, q, k, v):
        found = [kernel.forward(q[own], copies.copy(k), copies.copy(v)) for own, kernel, copies in self.parts]
        if len(found) == 1:
            return found[0]
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs), torch.cat(lses, dim=1)

    def backward(self, grad, q, k, v, out, lse):
        of_queries, sums = [], None
        for own, kernel, copies in self.parts:
            saved = out[own], lse[:, own].contiguous()
            grad_q, *of_copies = kernel.backward(grad[own], q[own], copies.copy(k), copies.copy(v), *saved)
            of_queries.append(grad_q)
            of_keys = [copies.sum(x) for x in of_copies]
            if len(self.parts) == 1:
                return grad_q, *of_keys
            of_keys = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in of_keys]
            sums = of_keys if sums is None else [total.add_(x) for total, x in zip(sums, of_keys, strict=True)]
        assert sums is not None
        return torch.cat(of_queries), sums[0].to(k.dtype), sums[1].to(v.dtype)


@dataclass(frozen=True)
class Blocks:
    """CPU kernel: sequences in equal blocks of a dense batch, padded on the right, where no token sees the padding.

    Without a window a block holds a whole sequence (a loop with one call per sequence is twelve times slower). With
    a window of w tokens a block holds w tokens. A token then sees its own block up to its own place, and the previous
    block from the same place on. The latter is a causal mask for reversed blocks, so no mask is materialised.
    """

    query_slots: torch.Tensor  # int64 [t_q], place of each query in the batch; other places are zero
    key_slots: torch.Tensor  # int64 [t_k], place of each key in the batch
    later: torch.Tensor  # int64, the blocks that see their previous block
    count: int
    size: int
    scale: float

    def _to_blocks(self, x, slots):
        """Scatter tokens ``[t, h, d]`` to blocks ``[blocks, h, size, d]``."""
        batch = x.new_zeros(self.count * self.size, *x.shape[1:]).index_copy(0, slots, x)
        return batch.view(self.count, self.size, *x.shape[1:]).transpose(1, 2)

    def _from_blocks(self, x, slots):
        """Gather tokens ``[t, h, d]`` from blocks ``[blocks, h, size, d]``."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, slots)

    def _with_previous(self, queries, keys):
        """Return the queries of the blocks that see their previous block, and that block's keys, both reversed."""
        return [x[self.later].flip(2) for x in queries], [x[self.later - 1].flip(2) for x in keys]

    def forward(self, q, k, v):
        q, k, v = (
            self._to_blocks(q, self.query_slots),
            self._to_blocks(k, self.key_slots),
            self._to_blocks(v, self.key_slots),
        )
        out, lse = _flash(q, k, v, self.scale)
        if len(self.later):
            (q,), (k, v) = self._with_previous([q], [k, v])
            before, lse_before = (x.flip(2) for x in _flash(q, k, v, self.scale))
            own, lse_own = out[self.later], lse[self.later]
            lse_both = torch.logaddexp(lse_own, lse_before)
            own, before = (x * (y - lse_both).exp()[..., None] for x, y in ((own, lse_own), (before, lse_before)))
            out[self.later], lse[self.later] = (own + before).to(out.dtype), lse_both
        return self._from_blocks(out, self.query_slots), self._from_blocks(lse[..., None], self.query_slots)[..., 0].T

    def backward(self, grad, q, k, v, out, lse):
        grad, q, out = (self._to_blocks(x, self.query_slots) for x in (grad, q, out))
        lse = self._to_blocks(lse.T[..., None], self.query_slots)  # 0 in the padding, where q = 0, p = 1 and d out = 0
        k, v = self._to_blocks(k, self.key_slots), self._to_blocks(v, self.key_slots)
        grad_q, grad_k, grad_v = _flash_backward(grad, q, k, v, out, lse[..., 0], self.scale)
        if len(self.later):
            (grad, q, out, lse), (k, v) = self._with_previous([grad, q, out, lse], [k, v])
            more = [x.flip(2) for x in _flash_backward(grad, q, k, v, out, lse[..., 0], self.scale)]
            grad_q.index_add_(0, self.later, more[0])
            grad_k.index_add_(0, self.later - 1, more[1])
            grad_v.index_add_(0, self.later - 1, more[2])
        return self._from_blocks(grad_q, self.query_slots), *(
            self._from_blocks(x, self.key_slots) for x in (grad_k, grad_v)
        )


def _flash(q, k, v, scale: float):
    """Call the CPU operator of ``scaled_dot_product_attention``, because that function does not return the lse."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)


def _flash_backward(grad, q, k, v, out, lse, scale: float):
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, q, k, v, out, lse, 0.0, True, scale=scale)
