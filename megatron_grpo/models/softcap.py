"""Soft-capping, cap * tanh(x / cap), of attention scores and logits (Gemma 2, arXiv:2408.00118, section 2)."""

from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

# (batch, head, query, key), all but the last two ignored -> whether this query sees this key, as flex_attention asks
Sees = Callable[..., torch.Tensor]


def soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(x / cap); x itself without a cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def soft_capped_attention(q, k, v, sees: Sees, scale: float, cap: float) -> torch.Tensor:
    """softmax(soft_cap(scale q k^T)) v over the keys that each query sees: ``[t_q, heads, d_v]``.

    q is ``[t_q, heads, d]``, k ``[t_k, groups, d]``, v ``[t_k, groups, d_v]``. torch's flash kernels have no cap. On a
    GPU flex_attention compiles one that has, in linear memory; on a CPU it has no backward pass, so there all scores of
    the pack are made.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if q.is_cuda:
        mask = _block_mask(sees, q.shape[2], k.shape[2], q.device)
        # Left to choose, it takes for less than 128 tokens a kernel for decoding, which has no block size for these.
        options = {"BACKEND": "TRITON"}
        out = _compiled(flex_attention)(q, k, v, _score_mod(cap), mask, scale, enable_gqa=True, kernel_options=options)
        return out[0].transpose(0, 1)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32))
    seen = sees(None, None, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2]))
    probabilities = soft_cap(scores * scale, cap).masked_fill(~seen, float("-inf")).softmax(-1)
    return (probabilities.to(v.dtype) @ v)[0].transpose(0, 1)


@lru_cache(maxsize=8)  # the layers of a micro-batch share them; a few, for layers with and without a window
def _block_mask(sees: Sees, queries: int, keys: int, device: torch.device):
    # Compiled, so that no mask of all queries and keys is made.
    return _compiled(create_block_mask)(sees, None, None, queries, keys, device=device)


@cache
def _score_mod(cap: float):
    return lambda score, batch, head, query, key: cap * torch.tanh(score / cap)


@cache
def _compiled(function: Callable) -> Callable:
    """``function``, compiled; its sizes become dynamic with the second pack.

    torch gives a function up when it has compiled it too often, and flex_attention would then make all scores of a
    pack: ``fullgraph`` makes that an error. (``dynamic=True`` would compile the scale as a variable, which fails.)
    """
    return torch.compile(function, fullgraph=True)
