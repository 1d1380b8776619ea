"""Self-attention of packs for the ``local`` layer spec: few kernels between the projection and attention on a GPU."""

from functools import cache
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as attention_factor,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention

from megatron_grpo.models.norm import RMSNorm, rms_norm
from megatron_grpo.models.rope import cosines_and_sines, rotate, rows_of_pack


class Norm(NamedTuple):
    """The norm of a head's channels (``--qk-layernorm``): arguments of `rms_norm`."""

    weight: torch.Tensor
    eps: float
    zero_centered: bool


class PackedSelfAttention(SelfAttention):
    """megatron-core's self-attention, with `queries_keys_values` in place of separate copies, norms and rotations.

    Without a pack, and where tensor-parallel ranks share the heads of a key, it computes what megatron-core computes.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._rotation: tuple[torch.Tensor, PackedSeqParams] | None = None  # angles and pack, during `forward`

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None, packed_seq_params=None, **more):
        shared = self.config.num_query_groups < self.world_size
        if rotary_pos_emb is not None and packed_seq_params is not None and not shared:
            self._rotation, rotary_pos_emb = (rotary_pos_emb, packed_seq_params), None
        more |= {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
        try:
            return super().forward(hidden_states, attention_mask, **more)
        finally:
            self._rotation = None

    def get_query_key_value_tensors(self, hidden_states, key_value_states=None, **more):
        """Return queries ``[t, 1, heads, d]``, keys and values ``[t, 1, groups, d]``; of a pack they are rotated."""
        if self._rotation is None:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, **more)
        freqs, packed = self._rotation
        projected, _ = self.linear_qkv(hidden_states)
        heads = projected.view(
            len(projected), self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
        )
        rows = rows_of_pack(projected, packed.cu_seqlens_q_padded, freqs, self.pg_collection.cp)
        interleaved = self.config.rotary_interleaved
        cos, sin = cosines_and_sines(freqs, rows, attention_factor(self.config), interleaved, projected.dtype)
        norms = [
            Norm(norm.weight, norm.eps, norm.zero_centered) if isinstance(norm, RMSNorm) else None
            for norm in (self.q_layernorm, self.k_layernorm)
        ]
        compute = queries_keys_values
        if projected.is_cuda:
            compute = _compiled()
            for tensor in (heads, cos, sin):  # packs differ in their tokens
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return tuple(part[:, None] for part in compute(heads, *norms, cos, sin, interleaved))


def queries_keys_values(
    heads: torch.Tensor,
    of_queries: Norm | None,
    of_keys: Norm | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries ``[t, groups * n, d]``, keys and values ``[t, groups, d]``; the first two normed and rotated.

    ``heads`` ``[t, groups, n + 2, d]`` is the output of megatron-core's projection: n queries, a key and a value for
    each group. The other arguments are those of `rotate`.
    """
    parts = []
    for part, norm in ((heads[:, :, :-2], of_queries), (heads[:, :, -2:-1], of_keys)):
        normed = part if norm is None else rms_norm(part, *norm)
        parts.append(rotate(normed, cos, sin, interleaved).flatten(1, 2))
    return *parts, heads[:, :, -1].contiguous()


@cache
def _compiled():
    return torch.compile(queries_keys_values)
