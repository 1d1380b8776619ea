"""Causal attention over packed sequences for the ``local`` layer spec.

megatron-core's own ``DotProductAttention`` refuses packed batches and materialises the s x s scores. This one takes
the packed (THD) layout only, since every batch here is packed: on CUDA through ``torch.nn.attention.varlen`` (a flash
kernel), on the CPU as one padded dense causal batch (a loop of calls, one a sequence, is twelve times slower).
"""

import inspect

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class PackedAttention(MegatronModule):
    """softmax(q k^T / sqrt(d)) v within each sequence of a pack, causal, grouped-query heads allowed.

    Takes q ``[t, heads, d]`` and k, v ``[t, groups, d]``; returns ``[t, heads * d]``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
    ):
        super().__init__(config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type=None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        assert packed_seq_params is not None, "every batch is packed"
        attend = _varlen if query.is_cuda else _padded_dense
        return attend(query, key, value, packed_seq_params, self.softmax_scale).flatten(1)


def _padded_dense(q, k, v, packed: PackedSeqParams, scale: float | None) -> torch.Tensor:
    """Sequences side by side, padded on the right: under the causal mask no real token can see the padding."""
    cu, longest = packed.cu_seqlens_q.long(), packed.max_seqlen_q
    lengths = cu.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    slots = rows * longest + torch.arange(len(rows)) - cu[rows]

    def pad(x):  # [t, h, d] -> [b, h, s, d]
        batch = x.new_zeros(len(lengths) * longest, *x.shape[1:]).index_copy(0, slots, x)
        return batch.view(len(lengths), longest, *x.shape[1:]).transpose(1, 2)

    out = torch.nn.functional.scaled_dot_product_attention(
        pad(q), pad(k), pad(v), is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, slots)


def _varlen(q, k, v, packed: PackedSeqParams, scale: float | None) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options = {"window_size": (-1, 0), "scale": scale}  # everything to the left, nothing to the right: causal
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.13 wants it said, 2.11 knows by itself
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    cu, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    return varlen_attn(q, k, v, cu, cu, longest, longest, **options)
