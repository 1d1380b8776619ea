"""Gated delta net, the linear attention of Qwen3-Next and Qwen3.5, over packed sequences.

Source: Yang et al., Gated Delta Networks, arXiv 2412.06464; in chunks as in Yang et al., arXiv 2406.06484.

The functions are pure; `GatedDeltaNet` is the layer. Heads are grouped by their keys: ``a`` key heads, each with ``r``
value heads. Every projection has the lines of one key head together, so that tensor parallelism cuts it into runs of
whole key heads, as it cuts ``linear_qkv`` into query groups.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
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
from packaging.version import Version
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megatron_grpo.data.pack import SharedPrompts
from megatron_grpo.models.norm import rms_norm
from megatron_grpo.models.param_gather import wait_for_weights
from megatron_grpo.models.rope import host_offsets
from megatron_grpo.models.shared_prompts import SharedPack
from megatron_grpo.parallel.context_parallel import place_in_pack, sharing_ranks
from megatron_grpo.parallel.zigzag import zigzag
from megatron_grpo.utils.device import to_device

KERNEL_DTYPES = torch.bfloat16, torch.float16  # other numbers are computed by plain torch
CHUNK = 64  # tokens that are computed by matrix products; the recurrence goes from chunk to chunk


class State(NamedTuple):
    """What n sequences leave to the tokens after them."""

    inputs: torch.Tensor  # [n, width - 1, channels], the last inputs of the convolution, zeros before a sequence
    memory: torch.Tensor  # [n, a, r, d_k, d_v], float32, S of `gated_delta_rule`


def causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: Sequence[int], before: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y ``[t, c]``, the last inputs of each sequence ``[n, width - 1, c]``) of a causal depthwise convolution.

    y_t = sum_i w_i x_{t - width + 1 + i} within each sequence of ``x`` ``[t, c]``; ``weight`` is ``[c, width]``. The
    inputs before a sequence are ``before`` ``[n, width - 1, c]``, or zeros. Computed in at least float32; y has the
    dtype of ``x``.
    """
    width, sequences = weight.shape[1], len(cu_seqlens) - 1
    slots, borders, last = _convolution_places(tuple(cu_seqlens), width, x.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    padded = x.new_zeros(len(x) + sequences * (width - 1), x.shape[1], dtype=dtype).index_copy(0, slots, x.to(dtype))
    if before is not None:
        padded = padded.index_copy(0, borders, before.flatten(0, 1).to(dtype))
    y = padded.new_zeros(max(len(padded) - width + 1, 0), x.shape[1])
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


class _Chunks(NamedTuple):
    """Sequences cut into chunks; the chunks of one step of the recurrence are neighbours."""

    size: int  # tokens of a chunk
    number: int  # of chunks
    slots: torch.Tensor  # int64 [t], row of each token among those of all chunks
    running: tuple[int, ...]  # chunks of each step: those of the sequences that have so many, the longest first
    order: torch.Tensor  # int64 [n], sequences from the longest to the shortest
    places: torch.Tensor  # int64 [n], the inverse


@lru_cache(maxsize=8)
def _chunks(cu_seqlens: tuple[int, ...], device: torch.device) -> _Chunks:
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
    return _Chunks(size, sum(running), to_device(torch.from_numpy(slots), device), tuple(running), *on_device)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: Sequence[int],
    before: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o ``[t, a, r, d_v]``, the last state of each sequence ``[n, a, r, d_k, d_v]``) of the gated delta rule.

    Within each sequence, for every value head, with alpha_t = exp(``log_decay``_t) (arXiv 2412.06464, equation 10,
    where S is transposed):

        S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t / sqrt(d_k)

    ``q``, ``k`` ``[t, a, d_k]``; ``v`` ``[t, a, r, d_v]``; ``log_decay`` (0 or less) and ``beta`` ``[t, a, r]``. S
    begins with ``before``, or with zeros. Computed in at least float32, in chunks of `CHUNK` tokens (section 3.3):
    with the sums G_i of the log decays from a chunk's begin, the corrections u_i = beta_i (v_i - what S recalls for
    k_i) of a chunk solve a triangular system,

        u_i + sum_{j<i} beta_i exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i)

    and S enters the next chunk as exp(G_last) S + sum_i exp(G_last - G_i) k_i u_i^T. ``o`` has the dtype of ``v``.
    """
    chunks = _chunks(tuple(cu_seqlens), v.device)
    dtype = torch.promote_types(v.dtype, torch.float32)
    sequences, (_, a, r, d_v), d_k = len(cu_seqlens) - 1, v.shape, k.shape[-1]
    state = v.new_zeros(sequences, a, r, d_k, d_v, dtype=dtype) if before is None else before.to(dtype)
    if not chunks.number:  # no tokens: the result still depends on the inputs, so that they have a gradient
        return v * (beta * log_decay)[..., None].to(v.dtype) + 0 * (q + k).sum().to(v.dtype), state

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """Return ``[chunks, a, ..., size, d]`` of ``[t, a, ..., d]``; a token that no sequence has is zero."""
        rows = x.new_zeros(chunks.number * chunks.size, *x.shape[1:], dtype=dtype)
        rows = rows.index_copy(0, chunks.slots, x.to(dtype))
        return rows.unflatten(0, (chunks.number, chunks.size)).movedim(1, -2)

    q, k, value = chunked(q * d_k**-0.5)[:, :, None], chunked(k)[:, :, None], chunked(v)  # q, k: [chunks, a, 1, ...]
    log_decay, beta = chunked(log_decay[..., None]), chunked(beta[..., None])  # [chunks, a, r, size, 1]
    total = log_decay.cumsum(-2)  # G
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=v.device).triu(1)
    decay = (total - total.mT).masked_fill(later, -torch.inf).exp()  # masked before: exp of a positive sum is inf
    from_begin, to_end = total.exp(), (total[..., -1:, :] - total).exp()
    system = beta * (k @ k.mT) * decay  # the diagonal is not read
    right = torch.cat((beta * value, beta * from_begin * k), -1)
    own, recalled = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split((d_v, d_k), -1)
    within, read, written = (q @ k.mT) * decay, from_begin * q, (to_end * k).mT
    last_decay = from_begin[..., -1:, :]

    state = state.index_select(0, chunks.order)
    ended, outs, begin = [state[chunks.running[0] :]], [], 0
    state = state[: chunks.running[0]]
    for step, count in enumerate(chunks.running):
        now = slice(begin, begin + count)
        u = own[now] - recalled[now] @ state
        outs.append(read[now] @ state + within[now] @ u)
        state = last_decay[now] * state + written[now] @ u
        begin += count
        going_on = chunks.running[step + 1] if step + 1 < len(chunks.running) else 0
        ended.append(state[going_on:])
        state = state[:going_on]
    out = torch.cat(outs).movedim(-2, 1).flatten(0, 1).index_select(0, chunks.slots)
    return out.to(v.dtype), torch.cat(ended[::-1]).index_select(0, chunks.places)


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Return x / sqrt(sum(x^2) + 1e-6) over the last dimension, in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_net(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    key_size: int,
    cu_seqlens: Sequence[int],
    before: State | None = None,
) -> tuple[torch.Tensor, State]:
    """Return (outputs ``[t, a, r, d_v]``, `State`) of convolution, silu and `gated_delta_rule`.

    ``qkv`` ``[t, a, 2 d_k + r d_v]`` has the query, the key and the r values of each key head; ``weight`` ``[a, 2 d_k
    + r d_v, width]``; ``log_decay`` and ``beta`` ``[t, a, r]``; ``key_size`` is d_k. Queries and keys have unit length.
    """
    if len(qkv) and qkv.is_cuda and _has_kernels(qkv.dtype):
        return _by_kernels(qkv, weight, log_decay, beta, key_size, cu_seqlens, before)
    inputs, memory = (None, None) if before is None else before
    mixed, inputs = causal_convolution(qkv.flatten(1), weight.flatten(0, 1), cu_seqlens, inputs)
    q, k, v = F.silu(mixed).view(qkv.shape).split(_sizes(qkv, key_size), -1)
    v = v.unflatten(-1, (log_decay.shape[2], -1))
    out, memory = gated_delta_rule(unit_length(q), unit_length(k), v, log_decay, beta, cu_seqlens, memory)
    return out, State(inputs, memory)


@lru_cache  # each layer asks in each pass, and a package that is absent is looked for in all of sys.path
def _has_kernels(dtype: torch.dtype) -> bool:
    return dtype in KERNEL_DTYPES and find_spec("fla") is not None


def kernels(dtype: torch.dtype) -> str:
    """Return what computes `delta_net` in tensors of this dtype on this device, for the log."""
    if not (torch.cuda.is_available() and _has_kernels(dtype)):
        return "plain torch"
    package = "flash-linear-attention"
    return package if _rule_has_kernel() else f"{package} (convolution) and plain torch (Triton's recurrence is wrong)"


def _sizes(qkv: torch.Tensor, key_size: int) -> tuple[int, int, int]:
    """Return the channels of a key head: of its query, its key and its values."""
    return key_size, key_size, qkv.shape[2] - 2 * key_size


def _by_kernels(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    key_size: int,
    cu_seqlens: Sequence[int],
    before: State | None,
) -> tuple[torch.Tensor, State]:
    """Compute `delta_net` by the kernels of flash-linear-attention."""
    from fla.modules.causal_conv1d import causal_conv1d  # Triton, and with it these kernels, exist with a GPU only
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    offsets = _offsets(tuple(cu_seqlens), qkv.device)
    heads, per_key = log_decay.shape[1:]
    # Their state has one more input, which no later output depends on, and has the channels before the inputs.
    inputs = None if before is None else F.pad(before.inputs.mT, (1, 0)).contiguous()
    mixed, inputs = causal_conv1d(
        qkv.flatten(1)[None],
        weight.flatten(0, 1).contiguous(),
        initial_state=inputs,
        output_final_state=True,
        activation="silu",
        **offsets,
    )
    inputs = inputs[..., 1:].mT
    q, k, v = mixed[0].view(qkv.shape).split(_sizes(qkv, key_size), -1)
    v = v.unflatten(-1, (per_key, -1))
    if not _rule_has_kernel():
        memory = None if before is None else before.memory
        out, memory = gated_delta_rule(unit_length(q), unit_length(k), v, log_decay, beta, cu_seqlens, memory)
        return out, State(inputs, memory)
    out, memory = chunk_gated_delta_rule(
        q[None].contiguous(),
        k[None].contiguous(),
        v.flatten(1, 2)[None].contiguous(),
        log_decay.flatten(1)[None],
        beta.flatten(1)[None],
        initial_state=None if before is None else before.memory.flatten(1, 2),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        **offsets,
    )
    return out[0].unflatten(1, (heads, per_key)), State(inputs, memory.unflatten(1, (heads, per_key)))


@lru_cache(maxsize=1)
def _rule_has_kernel() -> bool:
    """Whether the rule has a kernel here: those of Triton 3.4 to 3.7.0 give wrong gradients on Hopper GPUs.

    https://github.com/fla-org/flash-linear-attention/issues/640; the package refuses them without TileLang.
    """
    import triton  # absent without a GPU

    is_hopper, found = torch.cuda.get_device_capability()[0] == 9, Version(triton.__version__)
    return not (is_hopper and Version("3.4") <= found < Version("3.7.1")) or find_spec("tilelang") is not None


@lru_cache(maxsize=8)  # the kernels remember what they derive from these tensors: the layers of a micro-batch share it
def _offsets(cu_seqlens: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    on_host = torch.tensor(cu_seqlens)
    return {"cu_seqlens": to_device(on_host, device), "cu_seqlens_cpu": on_host}


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


def delta_net_of_pack(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    key_size: int,
    cu_seqlens: tuple[int, ...],
    shared: SharedPrompts | None,
) -> torch.Tensor:
    """Return the outputs of `delta_net` for a whole pack; with ``shared``, sequences go on from their parents' ends."""
    if shared is None:
        return delta_net(qkv, weight, log_decay, beta, key_size, cu_seqlens)[0]
    outs: list[torch.Tensor] = []
    state: State | None = None
    levels = _levels(cu_seqlens, shared, qkv.device)
    for level in levels:
        before = None if state is None else State(*(x.index_select(0, level.parents) for x in state))
        own_qkv, own_decay, own_beta = (x.index_select(0, level.tokens) for x in (qkv, log_decay, beta))
        out, state = delta_net(own_qkv, weight, own_decay, own_beta, key_size, level.offsets, before)
        outs.append(out)
    whole = outs[0].new_zeros(len(qkv), *outs[0].shape[1:])
    return whole.index_copy(0, torch.cat([level.tokens for level in levels]), torch.cat(outs))


def gated_norm(out: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return RMSNorm(``out``) silu(``gate``) ``[..., d]``, computed in at least float32; ``weight`` ``[d]``."""
    exact = torch.promote_types(out.dtype, torch.float32)
    return (rms_norm(out.to(exact), weight.to(exact), eps, False) * F.silu(gate.to(exact))).to(out.dtype)


def _recomputed(function: Callable, *inputs: Any) -> Any:
    """Return the result of a function whose backward pass computes it again from the inputs, and stores nothing else.

    What the chunks store in float32 is several times the layer's input and output.
    """
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


class GatedDeltaNetSubmodules(NamedTuple):
    """Column-parallel input projection and row-parallel output projection."""

    in_proj: Any
    out_proj: Any


class GatedDeltaNet(MegatronModule):
    """The layer in the place of self-attention: y = W_o (RMSNorm(o) silu(z)), o of `delta_net`.

    q, k, v, z and the scalars b, a of each value head are one projection of the input; beta = sigmoid(b) and log_decay
    = -exp(A_log) softplus(a + dt_bias). Names and flags are those of megatron-core's layer (``--linear-num-key-heads``,
    ...), whose projection has another order of lines.

    A tensor-parallel rank has whole key heads with their value heads. Under context parallelism an all-to-all gives
    each rank all tokens of the pack for a part of these heads, and another one brings the outputs back. A_log stays
    float32 in a model of 16 bits, as in published checkpoints.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        # Takes the place of `delta_net_of_pack` in generation: (qkv, weight, log_decay, beta) -> outputs.
        self.generation: Callable | None = None
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.cp_group = groups.tp, groups.cp
        self.key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_heads = divide(config.linear_num_key_heads, self.tp_group.size())  # of this rank
        self.values_per_key = divide(config.linear_num_value_heads, config.linear_num_key_heads)
        values = self.values_per_key * value_size
        # Lines of a key head: query, key, values; their output gates z; b and a.
        self.parts = (2 * self.key_size + values, values, self.values_per_key, self.values_per_key)
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            config.linear_num_key_heads * sum(self.parts),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        heads, width = self.key_heads * self.values_per_key, config.linear_conv_kernel_dim
        options = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.conv1d, self.out_norm = torch.nn.Module(), torch.nn.Module()
        self.conv1d.weight = self._sharded(torch.empty(self.key_heads * self.parts[0], 1, width, **options))
        self.dt_bias = self._sharded(torch.ones(heads, **options))
        self.A_log = self._sharded(torch.empty(heads, **options | {"dtype": torch.float32}))
        self.out_norm.weight = torch.nn.Parameter(torch.ones(value_size, **options))
        self.out_proj = submodules.out_proj(
            config.linear_num_value_heads * value_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )
        if config.perform_initialization:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                self.conv1d.weight.data.uniform_(-(width**-0.5), width**-0.5)
                self.A_log.data.uniform_(0.01, 16).log_()

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a sequence's `State` on this rank: inputs, and memory."""
        inputs = self.config.linear_conv_kernel_dim - 1, self.key_heads * self.parts[0]
        return inputs, (self.key_heads, self.values_per_key, self.key_size, self.config.linear_value_head_dim)

    @staticmethod
    def _sharded(values: torch.Tensor) -> torch.nn.Parameter:
        """Return a parameter of this rank's heads, all of which the gradient norm counts."""
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
        qkv, gate, b, a = projected.view(len(projected), self.key_heads, -1).split(self.parts, -1)
        if packed_seq_params is not None:
            out = self._of_pack(qkv, b, a, packed_seq_params)  # [t, a, r, d_v]
        else:
            assert self.generation is not None, "every batch is packed, except for generation"
            out = self.generation(qkv, *self._parameters_of(b, a, slice(None)))
        # Each tensor-parallel rank has other heads: the gradient of the norm's weight is the sum over them.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        out = _recomputed(gated_norm, out, gate.reshape(out.shape), weight, self.config.layernorm_epsilon)
        return self.out_proj(out.view(len(out), 1, -1))

    def _of_pack(self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, pack: PackedSeqParams) -> torch.Tensor:
        """Return the outputs of this rank's tokens and heads before the norm, ``[t, a, r, d_v]``."""
        offsets = tuple(host_offsets(pack).tolist())
        degree, number = place_in_pack(len(qkv), offsets, self.cp_group)
        group = sharing_ranks(degree)
        heads = slice(None)
        if group is not None:
            order = _pack_order(offsets, degree, qkv.device)
            parts = self.parts[0], *self.parts[2:]
            qkv, b, a = self._to_heads(torch.cat((qkv, b, a), -1), group, order).split(parts, -1)
            share = divide(self.key_heads, degree)
            heads = slice(number * share, (number + 1) * share)
        shared = pack.shared if isinstance(pack, SharedPack) else None
        inputs = *self._parameters_of(b, a, heads), self.key_size, offsets, shared
        out = _recomputed(delta_net_of_pack, qkv, *inputs)
        if group is None:
            return out
        return self._to_tokens(out.flatten(2), group, order).unflatten(2, out.shape[2:])

    def _parameters_of(
        self, b: torch.Tensor, a: torch.Tensor, heads: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return weight, log_decay and beta of `delta_net` for some of this rank's key heads."""
        exact, by_key = torch.promote_types(a.dtype, torch.float32), (self.key_heads, self.values_per_key)
        steps = F.softplus(a.to(exact) + self.dt_bias.view(by_key)[heads].to(exact))
        log_decay = -self.A_log.view(by_key)[heads].to(exact).exp() * steps
        weight = cast(torch.Tensor, self.conv1d.weight).view(self.key_heads, self.parts[0], -1)
        return weight[heads], log_decay, b.to(exact).sigmoid()

    @staticmethod
    def _to_heads(x: torch.Tensor, group: ProcessGroup, order: "_Order") -> torch.Tensor:
        """Return all tokens of the pack in its order, ``[t, a / cp, c]``, for this rank's part of the key heads.

        ``x`` ``[t / cp, a, c]`` are its own tokens with all key heads.
        """
        parts = x.unflatten(1, (group.size(), -1)).movedim(1, 0)  # [cp, t / cp, a / cp, c]
        whole = tensor_parallel.all_to_all(group, parts.flatten(0, 1).contiguous())
        return whole.index_select(0, order.whole)

    @staticmethod
    def _to_tokens(x: torch.Tensor, group: ProcessGroup, order: "_Order") -> torch.Tensor:
        """Return the inverse of `_to_heads`."""
        parts = tensor_parallel.all_to_all(group, x.index_select(0, order.by_rank).contiguous())
        return parts.unflatten(0, (group.size(), -1)).movedim(0, 1).flatten(1, 2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the parameters as shards over tensor-parallel ranks, by key heads; the norm is replicated."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own = {
            name: parameter
            for name, parameter in self.state_dict(prefix="", keep_vars=True).items()
            if not name.startswith(("in_proj.", "out_proj."))
        }
        found = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"conv1d.weight": 0, "dt_bias": 0, "A_log": 0},
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


def delta_net_spec(in_proj: Any, out_proj: Any) -> ModuleSpec:
    """Return the specification of the layer, given its linear layers."""
    return ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(in_proj, out_proj))
