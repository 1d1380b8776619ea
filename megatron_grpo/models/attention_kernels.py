"""Attention over packed sequences by the device's flash kernel, with sliding windows and sinks, in linear memory.

A kernel is a pair of plain functions: output and logarithm of the softmax's denominator (lse), and the gradients of q,
k and v given those two. What is more than one call follows from outputs o and lse l, without a look at the scores:

* A sink is one more logit s per head that has no value: lse' = log(e^l + e^s), out' = o e^(l - lse').
* Two disjoint sets of keys: lse' = log(e^l1 + e^l2), out' = o1 e^(l1 - lse') + o2 e^(l2 - lse').

A flash backward makes the probabilities again as p = e^(score - lse), and d score = p (d p - sum(d out * out)) (Dao
2023, FlashAttention-2, algorithm 2): called with lse' and out' it gives the gradients of the whole through its keys.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


class Kernel(Protocol):
    """q ``[t_q, heads, d]``, k and v ``[t_k, groups, d]``, out ``[t_q, heads, d]``, lse ``[heads, t_q]``."""

    def forward(self, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse)."""

    def backward(self, grad, q, k, v, out, lse) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v for d out = ``grad``."""


class Attention(torch.autograd.Function):
    """``apply(q, k, v, sink, kernel)``: out ``[t_q, heads, d]``; ``sink`` is one logit per head ``[heads]`` or None."""

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
        if sink is not None:  # its value is 0, so that only the subtracted term is left of p (d p - sum(d out * out))
            share = torch.exp(sink.to(lse.dtype)[:, None] - lse)
            grad_sink = -(share * (grad.to(lse.dtype) * out).sum(-1).T).sum(1).to(sink.dtype)
        return *ctx.kernel.backward(grad, q, k, v, out, lse), grad_sink, None


@dataclass(frozen=True)
class Varlen:
    """CUDA: one call over ragged segments of queries, each with its own segment of keys.

    The operations of ``torch.nn.attention.varlen``, whose own function keeps the lse out of the backward pass. When a
    segment has more keys than queries, both end together (bottom-right alignment, flash-attn's README on version 2.1).
    """

    cu_queries: torch.Tensor  # int32 [n + 1]
    cu_keys: torch.Tensor  # int32 [n + 1]
    longest_queries: int
    longest_keys: int
    left: int  # tokens to the left that a token sees besides itself, or -1: all
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
        state = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # of the dropout
        return torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *positional, *state, **named)


@dataclass(frozen=True)
class Blocks:
    """CPU: sequences laid out in equal blocks of a dense batch, padded on the right, where no real token can see it.

    Without a window a block holds a whole sequence (a loop of calls, one a sequence, is twelve times slower). With a
    window of w a block holds w tokens: a token sees its own block up to itself and the one before from itself on. The
    latter is a causal mask too once both blocks are reversed, so that no mask is ever made.
    """

    query_slots: torch.Tensor  # int64 [t_q], where in the batch each query goes; elsewhere there are zeros
    key_slots: torch.Tensor  # int64 [t_k]
    later: torch.Tensor  # int64, the blocks that see the one before them
    count: int
    size: int
    scale: float

    def _lay(self, x, slots):
        """[t, h, d] -> [blocks, h, size, d]."""
        batch = x.new_zeros(self.count * self.size, *x.shape[1:]).index_copy(0, slots, x)
        return batch.view(self.count, self.size, *x.shape[1:]).transpose(1, 2)

    def _read(self, x, slots):
        return x.transpose(1, 2).flatten(0, 1).index_select(0, slots)

    def _earlier(self, queries, keys):
        """Those blocks that see the one before them, and the latter, reversed."""
        return [x[self.later].flip(2) for x in queries], [x[self.later - 1].flip(2) for x in keys]

    def forward(self, q, k, v):
        q, k, v = self._lay(q, self.query_slots), self._lay(k, self.key_slots), self._lay(v, self.key_slots)
        out, lse = _flash(q, k, v, self.scale)
        if len(self.later):
            (q,), keys = self._earlier([q], [k, v])
            before, lse_before = (x.flip(2) for x in _flash(q, *keys, self.scale))
            own, lse_own = out[self.later], lse[self.later]
            lse_both = torch.logaddexp(lse_own, lse_before)
            own, before = (x * (y - lse_both).exp()[..., None] for x, y in ((own, lse_own), (before, lse_before)))
            out[self.later], lse[self.later] = (own + before).to(out.dtype), lse_both
        return self._read(out, self.query_slots), self._read(lse[..., None], self.query_slots)[..., 0].T

    def backward(self, grad, q, k, v, out, lse):
        grad, q, out = (self._lay(x, self.query_slots) for x in (grad, q, out))
        lse = self._lay(lse.T[..., None], self.query_slots)  # 0 where there is no query: with q = 0, p = 1, d out = 0
        k, v = self._lay(k, self.key_slots), self._lay(v, self.key_slots)
        grad_q, grad_k, grad_v = _flash_backward(grad, q, k, v, out, lse[..., 0], self.scale)
        if len(self.later):
            (grad, q, out, lse), keys = self._earlier([grad, q, out, lse], [k, v])
            more = [x.flip(2) for x in _flash_backward(grad, q, *keys, out, lse[..., 0], self.scale)]
            grad_q.index_add_(0, self.later, more[0])
            grad_k.index_add_(0, self.later - 1, more[1])
            grad_v.index_add_(0, self.later - 1, more[2])
        return self._read(grad_q, self.query_slots), *(self._read(x, self.key_slots) for x in (grad_k, grad_v))


def _flash(q, k, v, scale: float):
    """What ``scaled_dot_product_attention`` runs on a CPU, which does not tell the lse."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)


def _flash_backward(grad, q, k, v, out, lse, scale: float):
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, q, k, v, out, lse, 0.0, True, scale=scale)
