"""Soft-capping, cap * tanh(x / cap), of attention scores and logits (Gemma 2, arXiv:2408.00118, section 2)."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

FLASH_CHANNELS = 256  # of a head, at most, in torch's flash kernels on a GPU
SMALL = 128 << 10  # bytes of shared memory: below it are GPUs of compute capability 8.6, 8.9 and 12.0 (99 KiB)

# flex_attention's mask_mod: (batch, head, query, key) -> whether the query sees the key; batch and head are ignored.
MaskMod = Callable[..., torch.Tensor]


def soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return cap * tanh(x / cap), or x for a cap of None."""
    return x if cap is None else cap * torch.tanh(x / cap)


def needs_flex(q: torch.Tensor, cap: float | None) -> bool:
    """Return whether torch's flash kernels cannot compute attention of queries ``[..., d]`` with this cap."""
    return cap is not None or (q.is_cuda and q.shape[-1] > FLASH_CHANNELS)


def soft_capped_attention(q, k, v, mask_mod: MaskMod, scale: float, cap: float | None) -> torch.Tensor:
    """Return softmax(soft_cap(scale q k^T)) v over the keys that each query sees, ``[t_q, heads, d_v]``.

    q is ``[t_q, heads, d]``, k ``[t_k, groups, d]``, v ``[t_k, groups, d_v]``. torch's flash kernels have no cap. On a
    GPU flex_attention compiles a kernel with a cap, in linear memory. On a CPU flex_attention has no backward pass, so
    all scores of the pack are materialised.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if q.is_cuda:
        mask = _block_mask(mask_mod, q.shape[2], k.shape[2], q.device)
        gpu = torch.cuda.get_device_properties(q.device)
        options = kernel_options(q.shape[-1], getattr(gpu, "shared_memory_per_block_optin", SMALL))  # not in ROCm's
        out = _compiled(flex_attention)(q, k, v, _score_mod(cap), mask, scale, enable_gqa=True, kernel_options=options)
        return out[0].transpose(0, 1)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32))
    seen = mask_mod(None, None, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2]))
    probabilities = soft_cap(scores * scale, cap).masked_fill(~seen, float("-inf")).softmax(-1)
    return (probabilities.to(v.dtype) @ v)[0].transpose(0, 1)


def kernel_options(channels: int, shared_memory: int) -> dict[str, Any]:
    """Return flex_attention's options for heads of ``channels`` on a GPU with ``shared_memory`` bytes for a block.

    torch chooses blocks and stages by the compute capability. Heads of 512 channels do not fit a Hopper GPU with its
    three stages (256 KiB, compiled by Triton 3.7). Heads of 256 and 512 do not fit an RTX 4090 (99 KiB) with its blocks
    (148 and 196 KiB, backward 132 and 64).
    """
    # For less than 128 tokens flex_attention would choose a decoding kernel, which has no block size for this case.
    options: dict[str, Any] = {"BACKEND": "TRITON"}
    if channels >= FLASH_CHANNELS and shared_memory < SMALL:
        blocks = {f"bwd_BLOCK_{name}": 16 for name in ("M1", "N1", "M2", "N2")}
        options |= {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 16, "fwd_num_stages": 2, "bwd_num_stages": 1} | blocks
    elif channels > FLASH_CHANNELS:
        options["fwd_num_stages"] = 2
    return options


@lru_cache(maxsize=8)  # the layers of a micro-batch share a mask; layers with and without a window differ
def _block_mask(mask_mod: MaskMod, queries: int, keys: int, device: torch.device):
    # Compiled, so that the mask of all queries and keys is never materialised.
    return _compiled(create_block_mask)(mask_mod, None, None, queries, keys, device=device)


@cache
def _score_mod(cap: float | None):
    return None if cap is None else lambda score, batch, head, query, key: cap * torch.tanh(score / cap)


@cache
def _compiled(function: Callable) -> Callable:
    """Compile ``function``; its sizes become dynamic with the second pack.

    After too many compilations torch falls back to eager mode, in which flex_attention materialises all scores of a
    pack; ``fullgraph`` makes this an error. (``dynamic=True`` would compile the scale as a variable, which fails.)
    """
    compiled = torch.compile(function, fullgraph=True)

    # torch's limit of 8 is below what a run needs: each of the first pack, the others, and those of less than 128
    # tokens, with gradients and without, in layers with a window and without.
    @torch._dynamo.config.patch(recompile_limit=32)
    def call(*args, **options):
        return compiled(*args, **options)

    return call
