"""Attention of the Qwen towers: a patch sees those of its image, or of a window of it."""

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

# transformers gives the offsets of images and windows to functions with "flash" in their name; others are called for
# each window alone, 86 times a layer for an image of a megapixel.
NAME = "flash_by_offsets"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_,
) -> tuple[torch.Tensor, None]:
    """Return the attention ``[1, t, heads, d]`` of ``[1, heads, t, d]`` within segments, without a causal mask.

    The scale is d^-1/2. ``cu_seq_lens_q`` [n + 1] are the segments' offsets, ``max_length_q`` is the longest.
    """
    if query.is_cuda and query.dtype != torch.float32:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        found = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        assert isinstance(found, torch.Tensor)  # alone, because no statistics are asked for
        return found[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    segments = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat([scaled_dot_product_attention(*segment) for segment in segments], dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, attend)


def use_offsets(tower: PreTrainedModel) -> PreTrainedModel:
    """Return the tower, which calls `attend`."""
    tower.config._attn_implementation = NAME
    return tower
