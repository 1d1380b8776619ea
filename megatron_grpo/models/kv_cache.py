"""Key/value cache for generation with the training model.

Within `generating` each attention layer of the model writes the keys and values of its tokens to a cache and attends to
the cached tokens; each recurrent layer keeps its `State` of every sequence. The model is called
without packing (``PolicyModel.hidden_states``), because megatron-core then uses a separate row of rotary frequencies
for each token: the row of the token's own position.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import unwrap_model

from megatron_grpo.models.attention import PackedAttention, attend, blocks, visible_keys
from megatron_grpo.models.attention_kernels import Attention, Blocks, Varlen
from megatron_grpo.models.recurrence import Recurrence, RecurrentLayer, State
from megatron_grpo.models.softcap import needs_flex, soft_cap, soft_capped_attention


@dataclass(frozen=True)
class Step:
    """The tokens of one forward pass: whole prompts, then the newest token of each running completion, then padding."""

    tokens: torch.Tensor  # int64 [t]
    positions: torch.Tensor  # int64 [t], within their sequences
    rows: torch.Tensor  # int64 [r], rows of the cache to write
    source: torch.Tensor  # int64 [r], the token for each of these rows; a prompt's tokens may go to several slots
    prompt_ends: tuple[int, ...]  # (0, end of the first prompt, ...)
    new_slots: torch.Tensor  # int64 [m], slots of the completions that begin with this step
    new_prompts: torch.Tensor  # int64 [m], number of the prompt of each
    slots: torch.Tensor  # int64 [n], slots of the running completions
    lengths: torch.Tensor  # int64 [n], cached tokens of each running completion, with the newest one
    longest: int  # maximum of `lengths`
    sampled: torch.Tensor  # int64 [s], the tokens after which the next token is sampled

    @cached_property
    def cu_prompts(self) -> torch.Tensor:
        """Return ``prompt_ends`` as int32 on the device."""
        return torch.tensor(self.prompt_ends, dtype=torch.int32).to(self.tokens.device, non_blocking=True)

    @property
    def longest_prompt(self) -> int:
        return max(end - begin for begin, end in zip(self.prompt_ends, self.prompt_ends[1:], strict=False))


class KVCache:
    """A cache of ``slots`` sequences of ``length`` tokens in each attention layer of ``model`` (this rank's chunks)."""

    def __init__(self, model: list[torch.nn.Module], slots: int, length: int):
        self.slots, self.length = slots, length
        self.step: Step | None = None  # tokens of the current forward pass
        # Layers that read the keys of one layer (models/gemma4.py) have one cache.
        attentions = list(_attentions(model))
        self._owners = [getattr(attention, "keys_of", number) for number, attention in enumerate(attentions)]
        self._shapes = dict(zip(self._owners, (_shapes(one, slots, length) for one in attentions), strict=True))
        self._dtype, self._device = next(model[0].parameters()).dtype, next(model[0].parameters()).device
        # Keys and values [slots * length, heads, d]; of a recurrent layer `State` of the slots.
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """Return the size of the cache of all layers on this rank."""
        shapes = chain.from_iterable(self._shapes.values())
        return sum(prod(shape) * (dtype or self._dtype).itemsize for shape, dtype in shapes)

    def allocate(self) -> None:
        """Allocate the memory, if it is not allocated."""
        if not self.layers:
            # Zeros, because masked values must not be nan: 0 times nan is nan.
            made = {
                owner: (self._zeros(*first), self._zeros(*second)) for owner, (first, second) in self._shapes.items()
            }
            self.layers = [made[owner] for owner in self._owners]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype or self._dtype, device=self._device)

    def free(self) -> None:
        """Free the memory."""
        self.layers = []


def _attentions(model: list[torch.nn.Module]) -> Iterator[Any]:
    """Yield the decoder's layers of attention or with a state; multi-token prediction is not used in generation."""
    for chunk in unwrap_model(model):
        for layer in chunk.decoder.layers:
            if not isinstance(layer.self_attention, IdentityOp):
                yield layer.self_attention


def _shapes(
    attention: Any, slots: int, length: int
) -> tuple[tuple[tuple[int, ...], torch.dtype | None], tuple[tuple[int, ...], torch.dtype | None]]:
    """Return shape and dtype (None: the model's) of the two tensors of a layer's cache on this rank.

    With MLA keys and values differ in size; the smaller one is padded with zeros.
    """
    config = attention.config
    if isinstance(attention, RecurrentLayer):
        inputs, memory = attention.state_shapes()
        return ((slots, *inputs), None), ((slots, *memory), torch.float32)
    if config.multi_latent_attention:
        heads, channels = attention.num_attention_heads_per_partition, max(attention.q_head_dim, config.v_head_dim)
    else:
        heads, channels = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    return ((slots * length, heads, channels), None), ((slots * length, heads, channels), None)


@contextlib.contextmanager
def generating(model: list[torch.nn.Module], cache: KVCache) -> Iterator[None]:
    """Use ``cache`` in the attention of ``model`` within the context, in evaluation mode.

    The caller sets ``cache.step`` before each forward pass. On exit every module, mode and setting is restored.
    """
    with contextlib.ExitStack() as undo:
        for module in (module for chunk in model for module in chunk.modules()):
            _patch(undo, module, "training", False)
        for chunk in unwrap_model(model):
            if chunk.position_embedding_type == "rope" and not chunk.config.multi_latent_attention:
                _patch(undo, chunk, "rotary_pos_emb", RopeByPosition(chunk.rotary_pos_emb, cache))
            _patch(undo, chunk.decoder, "input_tensor", None)
        for attention, (keys, values) in zip(_attentions(model), cache.layers, strict=True):
            if isinstance(attention, RecurrentLayer):
                _patch(undo, attention, "generation", CachedRecurrence(cache, State(keys, values)))
                continue
            if attention.config.multi_latent_attention:
                _patch(undo, attention, "rotary_pos_emb", RopeByPosition(attention.rotary_pos_emb, cache))
            # The fused kernels of latent attention need cosines and sines of consecutive positions.
            _patch(undo, attention.config, "apply_rope_fusion", False)
            _patch(undo, attention, "core_attention", CachedAttention(attention, cache, keys, values))
        yield


def _patch(undo: contextlib.ExitStack, owner, name: str, value) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


class RopeByPosition(torch.nn.Module):
    """Replacement of a rotary embedding that returns the rows of its table for the positions of the current tokens."""

    def __init__(self, rope: torch.nn.Module, cache: KVCache):
        super().__init__()
        table = rope(cache.length, packed_seq=True)  # packed: not split over context-parallel ranks
        # megatron-core's YaRN embedding also returns a factor of cosines and sines.
        self.table, self.factor = table if isinstance(table, tuple) else (table, None)
        self.cache = cache

    def get_rotary_seq_len(self, *args, **kwargs) -> int:
        return self.cache.length

    def forward(self, *args, **kwargs):
        """Return ``[t, 1, 1, d]``, or ``[2, t, 1, 1, d]`` for `TwoRopes`; a pair with the factor for YaRN."""
        assert self.cache.step is not None
        rows = self.table.index_select(self.table.ndim - 4, self.cache.step.positions)
        return rows if self.factor is None else (rows, self.factor)


class CachedRecurrence:
    """Computes a recurrent layer in generation: over prompts, and over one token of each completion.

    Takes the recurrence and what it reads of the tokens of the cache's ``step``; returns ``[t, a, r, d_v]``, padding 0.
    """

    def __init__(self, cache: KVCache, state: State):
        self.cache, self.state = cache, state

    def __call__(self, recurrence: Recurrence, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        step = self.cache.step
        assert step is not None
        prompts, running = step.prompt_ends[-1], len(step.slots)
        outs = []
        if prompts:
            out, state = recurrence([x[:prompts] for x in tokens], step.prompt_ends, None)
            self._keep(step.new_slots, State(*(x.index_select(0, step.new_prompts) for x in state)))
            outs.append(out)
        if running:
            before = State(*(kept.index_select(0, step.slots) for kept in self.state))
            own = [x[prompts : prompts + running] for x in tokens]
            out, state = recurrence(own, tuple(range(running + 1)), before)
            self._keep(step.slots, state)
            outs.append(out)
        if not outs:  # padding alone: its shape
            outs.append(recurrence([x[:0] for x in tokens], (0,), None)[0])
        padding = len(tokens[0]) - prompts - running
        return torch.cat((*outs, outs[0].new_zeros(padding, *outs[0].shape[1:])))

    def _keep(self, slots: torch.Tensor, state: State) -> None:
        for kept, new in zip(self.state, state, strict=True):
            kept.index_copy_(0, slots, new.to(kept.dtype))


class CachedAttention(torch.nn.Module):
    """Replacement of an attention module's ``core_attention``: the same function over prompts and the cache.

    ``forward`` takes q ``[t, 1, heads, d]``, k ``[t, 1, groups, d]`` and v ``[t, 1, groups, d_v]`` of the cache's
    ``step`` and returns ``[t, 1, heads * d_v]``, 0 for padding. Each context-parallel rank has other, whole sequences.
    """

    def __init__(self, attention: Any, cache: KVCache, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        config = attention.config
        self.core, self.cache, self.keys, self.values = attention.core_attention, cache, keys, values
        # Only PackedAttention has sinks and soft caps: layer_specs.py never uses Transformer Engine for them.
        packed = isinstance(self.core, PackedAttention)
        self.softcap = self.core.softcap if packed else None
        self.sinks = self.core.sinks if packed else lambda query: None
        scale = attention.softmax_scale if config.multi_latent_attention else config.softmax_scale
        self.scale = keys.shape[-1] ** -0.5 if scale is None else scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, attention.layer_number)
        self.left = config.window_size[0] if windowed else -1

    def forward(self, query, key, value, attention_mask, **unused) -> torch.Tensor:
        step = self.cache.step
        assert step is not None
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        channels = v.shape[-1]
        self.keys[..., : k.shape[-1]].index_copy_(0, step.rows, k.index_select(0, step.source))
        self.values[..., :channels].index_copy_(0, step.rows, v.index_select(0, step.source))
        prompts, running = step.prompt_ends[-1], len(step.slots)
        out = q.new_zeros(*q.shape[:-1], channels)
        if prompts:
            out[:prompts] = self._prefill_attention(q[:prompts], k[:prompts], v[:prompts])
        if running:
            out[prompts : prompts + running] = self._decode_attention(q[prompts : prompts + running])[..., :channels]
        return out.flatten(1)[:, None]

    def _prefill_attention(self, q, k, v) -> torch.Tensor:
        """Compute causal attention within each prompt, with the kernels of training."""
        step = self.cache.step
        assert step is not None
        if needs_flex(q, self.softcap):
            mask_mod = visible_keys(step.prompt_ends, 1, 0, self.left, q.device)
            return soft_capped_attention(q, k, v, mask_mod, self.scale, self.softcap)
        kernel: Varlen | Blocks
        if q.is_cuda:
            longest = step.longest_prompt
            kernel = Varlen(step.cu_prompts, step.cu_prompts, longest, longest, self.left, self.scale)
        else:
            kernel = blocks(step.prompt_ends, 1, 0, self.left, self.scale)
        return attend(q, k, v, self.sinks(q), kernel)

    def _decode_attention(self, q) -> torch.Tensor:
        """Compute attention of one query for each running completion over the cache: ``[n, heads, d]``."""
        step = self.cache.step
        assert step is not None
        q = torch.nn.functional.pad(q, (0, self.keys.shape[-1] - q.shape[-1]))
        own_scores = needs_flex(q, self.softcap)
        if q.is_cuda and not own_scores:
            kernel = Decode(step, self.cache.length, self.left, self.scale)
            return Attention.apply(q, self.keys, self.values, self.sinks(q), kernel)
        grid = (self.cache.slots, self.cache.length)
        keys, values = (
            x.view(*grid, *x.shape[1:])[:, : step.longest].index_select(0, step.slots).transpose(1, 2)
            for x in (self.keys, self.values)
        )  # [n, groups, longest, d]
        places = torch.arange(step.longest, device=q.device)
        seen = places < step.lengths[:, None]
        if self.left >= 0:
            seen &= places >= step.lengths[:, None] - 1 - self.left
        bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))[:, None, None]
        if not own_scores:
            return Attention.apply(q, keys, values, self.sinks(q), MaskedDecode(bias, self.scale))
        # In float32: scores of a 16-bit product are too inexact for the cap.
        scores = _grouped(q, keys).float() @ keys.float().transpose(2, 3) * self.scale
        probabilities = (soft_cap(scores, self.softcap) + bias.float()).softmax(-1)
        return (probabilities.to(values.dtype) @ values).reshape(q.shape)


def _grouped(q, keys) -> torch.Tensor:
    """Reshape queries ``[n, heads, d]`` to ``[n, groups, heads / groups, d]``; the heads of a group share its keys."""
    return q.reshape(len(q), keys.shape[1], -1, q.shape[-1])


@dataclass(frozen=True)
class Decode:
    """CUDA kernel: the flash kernel of `Varlen` over partly filled slots of the cache, without a copy."""

    step: Step
    length: int  # tokens of a slot
    left: int  # as in `Varlen`
    scale: float

    def forward(self, q, k, v):
        """Return (out, lse); k and v are the whole cache."""
        n = len(q)
        queries = torch.arange(n + 1, dtype=torch.int32, device=q.device)
        begins = torch.nn.functional.pad(
            self.step.slots * self.length, (0, 1)
        ).int()  # the kernel reads begins and seqused_k only
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            queries,
            begins,
            1,
            self.step.longest,
            0.0,
            self.left < 0,
            False,
            scale=self.scale,
            window_size_left=self.left,
            window_size_right=0,
            seqused_k=self.step.lengths.int(),
        )
        return out, lse


@dataclass(frozen=True)
class MaskedDecode:
    """CPU kernel: the flash kernel over copies of the slots in use; ``bias`` ``[n, 1, 1, longest]`` masks keys."""

    bias: torch.Tensor
    scale: float

    def forward(self, q, k, v):
        """Return (out, lse); k and v are ``[n, groups, longest, d]``."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(_grouped(q, k), k, v, attn_mask=self.bias, scale=self.scale)
        return out.reshape(q.shape), lse.reshape(len(q), -1).T
