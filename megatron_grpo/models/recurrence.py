"""Recurrent layers in the place of attention, over packed sequences: what gated delta nets and Mamba-2 have in common.

Heads come in groups: ``a`` groups (of a delta net: key heads), each with ``r`` heads. Every projection has the lines of
one group together, so that tensor parallelism cuts it into runs of whole groups, as it cuts ``linear_qkv`` into query
groups. No convolution and no state goes on from a sequence to the next one in a pack.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.core.utils import divide
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megatron_grpo.data.pack import SharedPrompts
from megatron_grpo.models.config import RecurrentSizes
from megatron_grpo.models.rope import host_offsets
from megatron_grpo.models.shared_prompts import SharedPack
from megatron_grpo.parallel.context_parallel import place_in_pack, sharing_ranks
from megatron_grpo.parallel.param_gather import wait_for_weights
from megatron_grpo.parallel.zigzag import zigzag
from megatron_grpo.utils.device import to_device

CHUNK = 64  # tokens that are computed by matrix products; the recurrence goes from chunk to chunk


class State(NamedTuple):
    """What n sequences leave to the tokens after them."""

    inputs: torch.Tensor  # [n, width - 1, channels], the last inputs of the convolution, zeros before a sequence
    memory: torch.Tensor  # [n, a, r, d_k, d_v], float32, the state S of each head


# (tensors of tokens, offsets of the sequences, their states before) -> (outputs [t, a, r, d_v], their states after)
Recurrence = Callable[[Sequence[torch.Tensor], tuple[int, ...], State | None], tuple[torch.Tensor, State]]


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    cu_seqlens: Sequence[int],
    before: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y ``[t, c]``, the last inputs of each sequence ``[n, width - 1, c]``) of a causal depthwise convolution.

    y_t = sum_i w_i x_{t - width + 1 + i} + bias within each sequence of ``x`` ``[t, c]``; ``weight`` is ``[c, width]``,
    ``bias`` ``[c]`` or None. The inputs before a sequence are ``before`` ``[n, width - 1, c]``, or zeros. Computed in
    at least float32; y has the dtype of ``x``.
    """
    width, sequences = weight.shape[1], len(cu_seqlens) - 1
    slots, borders, last = _convolution_places(tuple(cu_seqlens), width, x.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    padded = x.new_zeros(len(x) + sequences * (width - 1), x.shape[1], dtype=dtype).index_copy(0, slots, x.to(dtype))
    if before is not None:
        padded = padded.index_copy(0, borders, before.flatten(0, 1).to(dtype))
    y = padded.new_zeros(max(len(padded) - width + 1, 0), x.shape[1])
    if bias is not None:
        y = y + bias.to(dtype)
    for place in range(width):
        y = y + padded[place : place + len(y)] * weight[:, place].to(dtype)
    y = y.index_select(0, slots - (width - 1)).to(x.dtype)
    return y, padded.index_select(0, last).view(sequences, width - 1, x.shape[1]).to(x.dtype)


@lru_cache(maxsize=8)  # the layers of a micro-batch share the result, as below
def _convolution_places(
    cu_seqlens: tuple[int, ...], width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows of tokens, of the inputs before each sequence, and of its last inputs.

    Rows of a tensor in which ``width`` - 1 rows stand before each sequence.
    """
    cu, room = np.array(cu_seqlens), np.arange(width - 1)
    number = np.arange(len(cu) - 1)
    slots = np.arange(cu[-1]) + (width - 1) * (np.repeat(number, np.diff(cu)) + 1)
    borders = (cu[:-1] + (width - 1) * number)[:, None] + room
    last = borders + np.diff(cu)[:, None]
    return tuple(to_device(torch.from_numpy(rows.ravel()), device) for rows in (slots, borders, last))  # type: ignore[return-value]


class Chunks(NamedTuple):
    """Sequences cut into chunks; the chunks of one step of the recurrence are neighbours."""

    size: int  # tokens of a chunk
    number: int  # of chunks
    slots: torch.Tensor  # int64 [t], row of each token among those of all chunks
    running: tuple[int, ...]  # chunks of each step: those of the sequences that have so many, the longest first
    order: torch.Tensor  # int64 [n], sequences from the longest to the shortest
    places: torch.Tensor  # int64 [n], the inverse

    def cut(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[chunks, a, ..., size, d]`` of ``[t, a, ..., d]``; a token that no sequence has is zero."""
        rows = x.new_zeros(self.number * self.size, *x.shape[1:], dtype=dtype).index_copy(0, self.slots, x.to(dtype))
        return rows.unflatten(0, (self.number, self.size)).movedim(1, -2)

    def decays(self, log_decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (products of the decays behind token j up to i, from a chunk's begin to i, behind i to its end).

        ``log_decay`` ``[chunks, a, r, size, 1]``; results ``[..., size, size]``, 0 for later j, and ``[..., size, 1]``.
        """
        total = log_decay.cumsum(-2)  # G
        later = torch.ones(self.size, self.size, dtype=torch.bool, device=total.device).triu(1)
        decay = (total - total.mT).masked_fill(later, -torch.inf).exp()  # masked before: exp of a positive sum is inf
        return decay, total.exp(), (total[..., -1:, :] - total).exp()

    def recurrence(
        self,
        state: torch.Tensor,
        own: torch.Tensor,
        recalled: torch.Tensor | None,
        read: torch.Tensor,
        within: torch.Tensor,
        written: torch.Tensor,
        decay: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (outputs ``[t, a, r, d_v]``, the last state of each sequence) from chunk to chunk.

        With the state S that enters a chunk: u = own - recalled S, o = read S + within u, and decay S + written u is
        the state that enters the next one. ``state`` ``[n, a, r, d_k, d_v]`` enters the first chunk of each sequence.
        Without ``recalled`` u is ``own``.
        """
        state = state.index_select(0, self.order)
        ended, outs, begin = [state[self.running[0] :]], [], 0
        state = state[: self.running[0]]
        for step, count in enumerate(self.running):
            now = slice(begin, begin + count)
            u = own[now] if recalled is None else own[now] - recalled[now] @ state
            outs.append(read[now] @ state + within[now] @ u)
            state = decay[now] * state + written[now] @ u
            begin += count
            going_on = self.running[step + 1] if step + 1 < len(self.running) else 0
            ended.append(state[going_on:])
            state = state[:going_on]
        out = torch.cat(outs).movedim(-2, 1).flatten(0, 1).index_select(0, self.slots)
        return out, torch.cat(ended[::-1]).index_select(0, self.places)


@lru_cache(maxsize=8)
def chunks_of(cu_seqlens: tuple[int, ...], device: torch.device) -> Chunks:
    cu = np.array(cu_seqlens)
    lengths = np.diff(cu)
    size = int(min(CHUNK, lengths.max(initial=1)))
    counts = -(-lengths // max(size, 1))
    order = np.argsort(-counts, kind="stable")
    places = np.argsort(order, kind="stable")
    running = [int((counts > step).sum()) for step in range(counts.max(initial=0))]
    begins = np.append(0, np.cumsum(running)).astype(np.int64)  # first chunk of each step
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)
    slots = (begins[position // size] + places[sequence]) * size + position % size
    on_device = (to_device(torch.from_numpy(rows), device) for rows in (order, places))
    return Chunks(size, sum(running), to_device(torch.from_numpy(slots), device), tuple(running), *on_device)


class _Level(NamedTuple):
    """The sequences of a pack with equally many ancestors."""

    tokens: torch.Tensor  # int64 [t], where theirs are in the pack, without padding behind a parent
    offsets: tuple[int, ...]
    parents: torch.Tensor  # int64 [n], number in the level before of the sequence that each goes on from


@lru_cache(maxsize=8)
def _levels(cu_seqlens: tuple[int, ...], shared: SharedPrompts, device: torch.device) -> tuple[_Level, ...]:
    """Return the levels of the tree, the roots first."""
    cu, cu_keys = np.array(cu_seqlens), shared.cu_keys.astype(np.int64)
    lengths = np.diff(cu)
    before, parent = np.diff(cu_keys) - lengths, shared.parent  # tokens of the ancestors, of each sequence
    child = np.flatnonzero(parent >= 0)
    lengths[parent[child]] = before[child] - before[parent[child]]
    levels, numbers = [], np.flatnonzero(parent < 0)
    place = np.zeros(len(lengths), np.int64)  # of each sequence in its level
    while len(numbers):
        own, ends = lengths[numbers], np.cumsum(lengths[numbers])
        tokens = np.arange(own.sum()) + np.repeat(cu[numbers] - ends + own, own)
        arrays = tokens, place[parent[numbers]]
        of_tokens, of_parents = (to_device(torch.from_numpy(x), device) for x in arrays)
        levels.append(_Level(of_tokens, (0, *ends.tolist()), of_parents))
        place[numbers] = np.arange(len(numbers))
        numbers = np.flatnonzero(np.isin(parent, numbers))
    return tuple(levels)


def of_pack(
    recurrence: Recurrence, tokens: Sequence[torch.Tensor], cu_seqlens: tuple[int, ...], shared: SharedPrompts | None
) -> torch.Tensor:
    """Return the outputs of ``recurrence`` for a whole pack; with ``shared``, sequences go on from their parents' ends.

    ``tokens``: what it reads of each token, ``[t, ...]``.
    """
    if shared is None:
        return recurrence(tokens, cu_seqlens, None)[0]
    outs: list[torch.Tensor] = []
    state: State | None = None
    levels = _levels(cu_seqlens, shared, tokens[0].device)
    for level in levels:
        before = None if state is None else State(*(x.index_select(0, level.parents) for x in state))
        out, state = recurrence([x.index_select(0, level.tokens) for x in tokens], level.offsets, before)
        outs.append(out)
    whole = outs[0].new_zeros(len(tokens[0]), *outs[0].shape[1:])
    return whole.index_copy(0, torch.cat([level.tokens for level in levels]), torch.cat(outs))


def recomputed(function: Callable, *inputs: Any) -> Any:
    """Return the result of a function whose backward pass computes it again from the inputs, and stores nothing else.

    What the chunks store in float32 is several times the layer's input and output.
    """
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


class RecurrentSubmodules(NamedTuple):
    """Column-parallel input projection and row-parallel output projection."""

    in_proj: Any
    out_proj: Any


class RecurrentLayer(MegatronModule):
    """A recurrent layer in the place of self-attention: y = W_o norm(o, z), where o is the output of the recurrence.

    The projection has, for each group, what the convolution mixes (``2 d_k + r d_v`` channels), the output gates z
    (``r d_v``), and the scalars of each head. A subclass gives the sizes, the recurrence and the norm.

    A tensor-parallel rank has whole groups. Under context parallelism an all-to-all gives each rank all tokens of the
    pack for a part of these groups, and another one brings the outputs back. A_log stays float32 in a model of 16 bits,
    as in the engine and in published checkpoints: in 16 bits the decay of a head would change by up to a percent.
    """

    sizes_of: Callable[[TransformerConfig], RecurrentSizes]
    conv1d: torch.nn.Module
    out_norm: torch.nn.Module
    dt_bias: torch.nn.Parameter
    A_log: torch.nn.Parameter

    def __init__(
        self,
        config: TransformerConfig,
        submodules: RecurrentSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ):
        super().__init__(config)
        sizes = type(self).sizes_of(config)
        self.layer_number = layer_number
        # Computes the recurrence in generation: (recurrence, tensors of tokens) -> outputs.
        self.generation: Callable[[Recurrence, Sequence[torch.Tensor]], torch.Tensor] | None = None
        process_groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.cp_group = process_groups.tp, process_groups.cp
        self.key_size, self.value_size = sizes.key, sizes.value
        self.groups = divide(sizes.groups, self.tp_group.size())  # of this rank
        self.heads_per_group = divide(sizes.heads, sizes.groups)
        values = self.heads_per_group * sizes.value
        self.mixed, self.gates, self.scalars = 2 * sizes.key + values, values, sizes.scalars * self.heads_per_group
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            sizes.groups * (self.mixed + self.gates + self.scalars),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.heads, self.width = self.groups * self.heads_per_group, sizes.width
        self.options = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.conv1d, self.out_norm = torch.nn.Module(), torch.nn.Module()
        self.conv1d.weight = self.of_groups(torch.empty(self.groups * self.mixed, 1, sizes.width, **self.options))
        self.dt_bias = self.of_groups(torch.ones(self.heads, **self.options))
        self.A_log = self.of_groups(torch.empty(self.heads, **self.options | {"dtype": torch.float32}))
        self.out_proj = submodules.out_proj(
            sizes.heads * sizes.value,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )
        if config.perform_initialization:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                self.conv1d.weight.data.uniform_(-(sizes.width**-0.5), sizes.width**-0.5)

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what is mixed, the gates and the scalars of the projection ``[t, a, c]``."""
        mixed, gates, scalars = projected.split((self.mixed, self.gates, self.scalars), -1)
        return mixed, gates, scalars

    def recurrence(
        self, mixed: torch.Tensor, scalars: torch.Tensor, groups: slice
    ) -> tuple[Recurrence, Sequence[torch.Tensor]]:
        """Return the recurrence of some of this rank's groups, and what it reads of each token."""
        raise NotImplementedError

    def norm(self, out: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return outputs ``[t, a, r, d_v]``, normed and multiplied by their gates."""
        raise NotImplementedError

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a sequence's `State` on this rank: inputs, and memory."""
        inputs = self.width - 1, self.groups * self.mixed
        return inputs, (self.groups, self.heads_per_group, self.key_size, self.value_size)

    @staticmethod
    def of_groups(values: torch.Tensor) -> torch.nn.Parameter:
        """Return a parameter of this rank's groups, all of which the gradient norm counts."""
        parameter = torch.nn.Parameter(values)
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def _apply(self, fn, recurse=True):
        whole = self.A_log.data
        super()._apply(fn, recurse)
        self.A_log.data = whole.to(self.A_log.device)
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (``[t, 1, hidden]``, None) for the tokens of a pack ``[t, 1, hidden]``, as self-attention does."""
        wait_for_weights(self.conv1d, self.out_norm)
        projected, _ = self.in_proj(hidden_states)
        mixed, gates, scalars = self.split(projected.view(len(projected), self.groups, -1))
        if packed_seq_params is not None:
            out = self._of_pack(mixed, scalars, packed_seq_params)  # [t, a, r, d_v]
        else:
            assert self.generation is not None, "every batch is packed, except for generation"
            out = self.generation(*self.recurrence(mixed, scalars, slice(None)))
        out = recomputed(self.norm, out, gates.reshape(out.shape))
        return self.out_proj(out.view(len(out), 1, -1))

    def _of_pack(self, mixed: torch.Tensor, scalars: torch.Tensor, pack: PackedSeqParams) -> torch.Tensor:
        """Return the outputs of this rank's tokens and heads before the norm, ``[t, a, r, d_v]``."""
        offsets = tuple(host_offsets(pack).tolist())
        degree, number = place_in_pack(len(mixed), offsets, self.cp_group)
        group = sharing_ranks(degree)
        groups = slice(None)
        if group is not None:
            order = _pack_order(offsets, degree, mixed.device)
            both = self._to_groups(torch.cat((mixed, scalars), -1), group, order)
            mixed, scalars = both.split((self.mixed, self.scalars), -1)
            share = divide(self.groups, degree)
            groups = slice(number * share, (number + 1) * share)
        shared = pack.shared if isinstance(pack, SharedPack) else None
        out = recomputed(of_pack, *self.recurrence(mixed, scalars, groups), offsets, shared)
        if group is None:
            return out
        return self._to_tokens(out.flatten(2), group, order).unflatten(2, out.shape[2:])

    def by_group(self, parameter: torch.Tensor, groups: slice) -> torch.Tensor:
        """Return a parameter ``[a r]`` of some of this rank's groups as ``[a, r]``, in at least float32."""
        return parameter.view(self.groups, -1)[groups].to(torch.promote_types(parameter.dtype, torch.float32))

    def conv_weight(self, groups: slice) -> torch.Tensor:
        """Return the weight of the convolution of some of this rank's groups, ``[a, c, width]``."""
        return cast(torch.Tensor, self.conv1d.weight).view(self.groups, self.mixed, -1)[groups]

    @staticmethod
    def _to_groups(x: torch.Tensor, group: ProcessGroup, order: "_Order") -> torch.Tensor:
        """Return all tokens of the pack in its order, ``[t, a / cp, c]``, for this rank's part of the groups.

        ``x`` ``[t / cp, a, c]`` are its own tokens with all groups.
        """
        parts = x.unflatten(1, (group.size(), -1)).movedim(1, 0)  # [cp, t / cp, a / cp, c]
        whole = tensor_parallel.all_to_all(group, parts.flatten(0, 1).contiguous())
        return whole.index_select(0, order.whole)

    @staticmethod
    def _to_tokens(x: torch.Tensor, group: ProcessGroup, order: "_Order") -> torch.Tensor:
        """Return the inverse of `_to_groups`."""
        parts = tensor_parallel.all_to_all(group, x.index_select(0, order.by_rank).contiguous())
        return parts.unflatten(0, (group.size(), -1)).movedim(0, 1).flatten(1, 2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the parameters as shards over tensor-parallel ranks, by groups; those of all groups are replicated."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own = {
            name: parameter
            for name, parameter in self.state_dict(prefix="", keep_vars=True).items()
            if not name.startswith(("in_proj.", "out_proj."))
        }
        found = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {name: 0 for name, parameter in own.items() if getattr(parameter, "tensor_model_parallel", False)},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in ("in_proj", "out_proj"):
            module = getattr(self, name)
            found |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return found


class _Order(NamedTuple):
    """Rows of tokens that are gathered rank by rank, and in the order of the pack."""

    whole: torch.Tensor  # int64 [t], gathered row of each token of the pack
    by_rank: torch.Tensor  # int64 [t], the inverse


@lru_cache(maxsize=8)
def _pack_order(cu_seqlens: tuple[int, ...], cp_size: int, device: torch.device) -> _Order:
    by_rank = np.concatenate([zigzag(np.array(cu_seqlens), cp_size, rank) for rank in range(cp_size)])
    return _Order(*(to_device(torch.from_numpy(rows), device) for rows in (np.argsort(by_rank), by_rank)))


def recurrent_spec(layer: type[RecurrentLayer], in_proj: Any, out_proj: Any) -> ModuleSpec:
    """Return the specification of a recurrent layer, given its linear layers."""
    return ModuleSpec(module=layer, submodules=RecurrentSubmodules(in_proj, out_proj))
