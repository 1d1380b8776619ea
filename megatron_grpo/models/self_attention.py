"""Self-attention of packs: few kernels between the projection and attention on a GPU."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as attention_factor,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.models.norm import AllHeadsNorm, RMSNorm, rms_norm
from megatron_grpo.models.rope import cosines_and_sines, host_offsets, rotate, rows_of_pack
from megatron_grpo.parallel.param_gather import wait_for_weights


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

    def _apply_output_gate(self, x, gate):
        """Return x sigmoid(gate), as megatron-core's method, which would compile it: that needs a C++ compiler."""
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)

    def get_query_key_value_tensors(self, hidden_states, key_value_states=None, **more):
        """Return queries ``[t, 1, heads, d]``, keys and values ``[t, 1, groups, d]``; of a pack they are rotated.

        With --attention-output-gate the output gate, of the shape of the queries, follows them.
        """
        if self._rotation is None:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, **more)
        freqs, packed = self._rotation
        projected, _ = self.linear_qkv(hidden_states)
        heads = projected.view(
            len(projected), self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
        )
        gate: tuple[torch.Tensor, ...] = ()
        if self.config.attention_output_gate:  # of each group: queries, their gates, a key and a value
            queries, gates, rest = heads.split([(heads.shape[2] - 2) // 2, (heads.shape[2] - 2) // 2, 2], 2)
            heads, gate = torch.cat((queries, rest), 2), (gates.flatten(1, 2)[:, None],)
        if isinstance(self.q_layernorm, AllHeadsNorm):
            queries, keys = self.q_layernorm(heads[:, :, :-2], 3), self.k_layernorm(heads[:, :, -2:-1], 3)
            heads = torch.cat([queries, keys, heads[:, :, -1:]], 2)
        cos, sin = rotation_of_pack(projected, packed, freqs, self.config, self.pg_collection.cp)
        interleaved = self.config.rotary_interleaved
        wait_for_weights(self.q_layernorm, self.k_layernorm)
        norms = [
            Norm(norm.weight, norm.eps, norm.zero_centered) if type(norm) is RMSNorm else None
            for norm in (self.q_layernorm, self.k_layernorm)
        ]
        compute = _function(heads, cos, interleaved)
        queries, keys, values = compute(heads, *norms, cos, sin, interleaved)
        return queries[:, None], keys[:, None], values[:, None], *gate


def _function(heads: torch.Tensor, cos: torch.Tensor, interleaved: bool) -> Callable:
    """Return `queries_keys_values`, or what computes the same on a GPU: a kernel, or the compiled function."""
    if not heads.is_cuda:
        return queries_keys_values
    size = heads.shape[-1]
    return _compiled if interleaved or cos.shape[-1] < size or size & (size - 1) else _by_kernel


def _by_kernel(heads, of_queries: Norm | None, of_keys: Norm | None, cos, sin, interleaved):
    from megatron_grpo.models.gpu_kernels import HeadsOfPack  # Triton exists with a GPU only

    if of_queries is None or of_keys is None:  # there are both or none
        return HeadsOfPack.apply(heads, None, None, cos, sin, 0.0, 0.0)
    one = float(of_queries.zero_centered)
    return HeadsOfPack.apply(heads, of_queries.weight, of_keys.weight, cos, sin, of_queries.eps, one)


def _compiled(heads, of_queries: Norm | None, of_keys: Norm | None, cos, sin, interleaved):
    for tensor in (heads, cos, sin):  # packs differ in their tokens
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compile()(heads, of_queries, of_keys, cos, sin, interleaved)


def rotation_of_pack(
    tokens: torch.Tensor, packed: PackedSeqParams, freqs: torch.Tensor, config: TransformerConfig, cp_group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `cosines_and_sines` of a rank's ``tokens`` ``[t, ...]`` of a pack; those of a `StaticPack` are its own."""
    own = getattr(packed, "rotation", None)
    if own is not None:
        return own
    rows = rows_of_pack(tokens, host_offsets(packed), freqs, cp_group)
    return cosines_and_sines(freqs, rows, attention_factor(config), config.rotary_interleaved, tokens.dtype)


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

    def turned(part: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        normed = part if norm is None else rms_norm(part, *norm)
        return rotate(normed, cos, sin, interleaved).flatten(1, 2)

    return turned(heads[:, :, :-2], of_queries), turned(heads[:, :, -2:-1], of_keys), heads[:, :, -1].contiguous()


@cache
def _compile() -> Callable:
    return torch.compile(queries_keys_values)
