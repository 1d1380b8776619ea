"""Causal attention over packed sequences for the ``local`` layer spec.

megatron-core's ``DotProductAttention`` refuses packed batches and context parallelism and materialises the s x s
scores. `PackedAttention` takes only the packed (THD) tensor layout, because every batch of the trainer is packed. Under
context parallelism each rank gathers the keys and values and keeps its queries (Llama 3, arXiv 2407.21783, section
3.3.2).
"""

from functools import lru_cache, partial

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide

from megatron_grpo.data.batch import Int64, offsets
from megatron_grpo.data.pack import SharedPrompts
from megatron_grpo.models.attention_kernels import (
    Attention,
    Blocks,
    FlashAttention4,
    Kernel,
    Part,
    SharedKeys,
    Varlen,
)
from megatron_grpo.models.rope import host_offsets
from megatron_grpo.models.row_copies import RowCopies
from megatron_grpo.models.shared_prompts import SharedPack
from megatron_grpo.models.softcap import MaskMod, needs_flex, soft_capped_attention
from megatron_grpo.parallel.context_parallel import place_in_pack, sharing_ranks
from megatron_grpo.parallel.zigzag import zigzag
from megatron_grpo.utils.device import to_device
from megatron_grpo.utils.errors import GrpoError

# Most copies of keys and values in one call of a GPU's kernel, as a multiple of those of the pack: many short answers
# to a long prompt would have hundreds.
MOST_COPIES = 8


class PackedAttention(MegatronModule):
    """Causal attention, softmax(scale q k^T) v, within each sequence of a pack.

    Supports grouped-query heads, a sliding window (``config.window_size``), sinks (``config.softmax_type``) and value
    heads of another size than key heads (MLA). Soft-capped scores are supported without sinks only.

    ``forward`` takes q ``[t / cp, heads, d]``, k ``[t / cp, groups, d]`` and v ``[t / cp, groups, d_v]``, tokens in the
    order of `zigzag`, and returns ``[t / cp, heads * d_v]``. cp ranks hold the pack (`place_in_pack`).
    """

    gpu_kernel: type[Varlen] = Varlen

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        softcap: float | None = None,
    ):
        super().__init__(config)
        self.softcap = softcap
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.cp_group = groups.tp, groups.cp
        self.softmax_scale = config.softmax_scale if softmax_scale is None else softmax_scale
        self.left = -1
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.left, right = config.window_size
            if right != 0:
                raise GrpoError(
                    f"--window-size {tuple(config.window_size)} would attend to {right} later tokens; give "
                    f"({self.left}, 0)"
                )
        if config.softmax_type == "learnable":
            self.softmax_offset = self._new_sinks()

    def _new_sinks(self) -> torch.nn.Parameter:
        """Create the sink logits ``[heads]`` of this tensor-parallel rank's heads."""
        heads = divide(self.config.num_attention_heads, self.tp_group.size())
        sinks = torch.nn.Parameter(
            torch.empty(heads, device=torch.cuda.current_device(), dtype=self.config.params_dtype)
        )
        # Without this attribute the gradient norm counts only the heads of the first tensor-parallel rank.
        tensor_parallel.set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
        if self.config.perform_initialization:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                self.config.init_method(sinks)
        return sinks

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
        cp_size, cp_rank = place_in_pack(len(query), host_offsets(packed_seq_params), self.cp_group)
        if cp_size > 1:
            gather = partial(tensor_parallel.gather_from_sequence_parallel_region, group=sharing_ranks(cp_size))
            key, value = gather(key), gather(value)
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        if needs_flex(query, self.softcap):
            offsets = tuple(host_offsets(packed_seq_params).tolist())
            shared = packed_seq_params.shared if isinstance(packed_seq_params, SharedPack) else None
            mask_mod = visible_keys(offsets, cp_size, cp_rank, self.left, query.device, shared)
            return soft_capped_attention(query, key, value, mask_mod, scale, self.softcap).flatten(1)
        kernel = self._kernel(packed_seq_params, cp_size, cp_rank, query.device, scale)
        return attend(query, key, value, self.sinks(query), kernel).flatten(1)

    def _kernel(self, pack: PackedSeqParams, cp_size: int, cp_rank: int, where: torch.device, scale: float) -> Kernel:
        """Return the kernel for a rank's queries and all keys of a pack."""
        shared = pack.shared if isinstance(pack, SharedPack) else None
        if where.type == "cuda" and cp_size == 1 and shared is None:
            cu, longest = pack.cu_seqlens_q, pack.max_seqlen_q
            return self.gpu_kernel(cu, cu, longest, longest, self.left, scale)
        cu_seqlens = tuple(host_offsets(pack).tolist())
        if where.type == "cpu":
            own = blocks(cu_seqlens, cp_size, cp_rank, self.left, scale, shared)
            keys = None if shared is None else shared_keys(cu_seqlens, cp_size, shared)
            return own if keys is None else SharedKeys([Part(slice(None), own, keys)])
        parts = segments(cu_seqlens, cp_size, cp_rank, where, self.left, shared)
        return SharedKeys([Part(own, self.gpu_kernel(*found, self.left, scale), keys) for own, found, keys in parts])

    def sinks(self, query: torch.Tensor) -> torch.Tensor | None:
        """Return the sink logit of each head, ``[heads]``, in the dtype of ``query``; None without sinks."""
        if self.config.softmax_type == "off-by-one":
            return query.new_zeros(query.shape[1])
        return self.softmax_offset if self.config.softmax_type == "learnable" else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the learnable sinks as shards over tensor-parallel ranks by heads; {} without learnable sinks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


class FlashPackedAttention(PackedAttention):
    """`PackedAttention` with the kernels of FlashAttention 4, for Hopper and Blackwell GPUs."""

    gpu_kernel = FlashAttention4


def attend(q, k, v, sinks: torch.Tensor | None, kernel: Kernel) -> torch.Tensor:
    """Compute attention with ``kernel``; pad keys or values with zeros to one head size, which kernels need.

    The backward pass keeps its inputs. Values are a part of the projection, which a copy of them lets go.
    """
    size, value_size = max(k.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (
        x.contiguous() if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))
        for x in (q, k, v)
    )
    return Attention.apply(q, k, v, sinks, kernel)[..., :value_size]


def _gathered_positions(cu_seqlens: np.ndarray, cp_size: int) -> np.ndarray:
    """Return the position in the pack of each gathered key; keys are gathered rank by rank."""
    return np.concatenate([zigzag(cu_seqlens, cp_size, rank) for rank in range(cp_size)])


def _runs(cu_seqlens: Int64, shared: SharedPrompts) -> tuple[Int64, Int64, Int64]:
    """Return the runs of queries of a pack: where the tokens of each begin, where its keys do, and all keys.

    A run is a leaf of the tree with those of its ancestors that stand right before it. Each goes on where the one
    before it ends, so that a run is the end of one causal sequence: the path to the leaf. An inner node is always
    followed by a child, and needs no copies of keys for its own queries.
    """
    ends = shared.leaves
    counts = np.diff(shared.cu_keys)[ends]
    cu_keys = offsets(counts)
    keys = shared.keys[np.arange(cu_keys[-1]) + np.repeat(shared.cu_keys[ends] - cu_keys[:-1], counts)]
    return cu_seqlens[np.append(0, ends + 1)], cu_keys, keys


# The results are cached because the layers of a micro-batch share them; layers with and without a window differ.
@lru_cache(maxsize=8)
def blocks(
    cu_seqlens: tuple[int, ...],
    cp_size: int,
    cp_rank: int,
    left: int,
    scale: float,
    shared: SharedPrompts | None = None,
) -> Blocks:
    """Build the CPU kernel for a rank's queries and the gathered keys; ``left`` is as in `Varlen`.

    With ``shared`` the keys are those of `shared_keys`, and the queries of a run are its last tokens.
    """
    tokens = np.array(cu_seqlens)
    cu_queries, cu = (tokens, tokens) if shared is None else _runs(tokens, shared)[:2]
    lengths = np.diff(cu)
    size = lengths.max() if left < 0 else min(max(left, 1), lengths.max())
    counts = -(-lengths // size)
    first = np.cumsum(counts) - counts  # first block of each sequence
    slots = np.repeat(first * size - cu[:-1], lengths) + np.arange(cu[-1])
    later = np.setdiff1d(np.arange(counts.sum()), first) if left else np.arange(0)
    queries = zigzag(tokens, cp_size, cp_rank)
    queries += (cu - cu_queries)[np.searchsorted(cu_queries, queries, side="right")]  # ends are aligned
    keys = slots if shared is not None else slots[_gathered_positions(cu, cp_size)]
    indices = slots[queries], keys, later
    of_queries, of_keys, of_later = map(torch.from_numpy, indices)
    return Blocks(of_queries, of_keys, of_later, int(counts.sum()), int(size), scale)


@lru_cache(maxsize=8)
def shared_keys(cu_seqlens: tuple[int, ...], cp_size: int, shared: SharedPrompts) -> RowCopies:
    """Return the keys of all runs among the gathered ones, on the CPU."""
    tokens = np.array(cu_seqlens)
    keys = _runs(tokens, shared)[2]
    return RowCopies(torch.from_numpy(np.argsort(_gathered_positions(tokens, cp_size))[keys]), cu_seqlens[-1])


@lru_cache(maxsize=8)
def segments(
    cu_seqlens: tuple[int, ...],
    cp_size: int,
    cp_rank: int,
    device: torch.device,
    left: int,
    shared: SharedPrompts | None = None,
) -> list[tuple[slice, tuple[torch.Tensor, torch.Tensor, int, int], RowCopies]]:
    """Return the segments of `Varlen` under context parallelism or with shared prompts, in parts (`SharedKeys`).

    Each part has its queries, its segments, and their keys, at most `MOST_COPIES` times those of the pack.

    Each of a rank's two chunks of a sequence is a segment of queries, without context parallelism each sequence, with
    shared prompts each run (`_runs`). Its keys are those up to its end that at least one query sees, of a completion
    those of its prompt before its own. Without a window and shared prompts a rank uses 1 + 1 / (2 cp) times the keys of
    the pack.
    """
    tokens = cu = np.array(cu_seqlens)
    keys, cu_whole = np.arange(cu[-1]), cu
    if shared is not None and cp_size > 1:
        keys, cu_whole = shared.keys, shared.cu_keys.astype(np.int64)
    elif shared is not None:
        cu, cu_whole, keys = _runs(tokens, shared)
    chunk, numbers = np.diff(cu)[:, None], np.zeros(1, np.int64)
    if cp_size > 1:
        chunk, numbers = chunk // (2 * cp_size), np.array([cp_rank, 2 * cp_size - 1 - cp_rank])
    before = np.diff(cu_whole) - np.diff(cu)  # keys of the prompt, of each sequence
    begin = before[:, None] + chunk * numbers  # [sequences, 2], among the keys of the sequence
    first_key = np.maximum(begin - left, 0) if left >= 0 else np.zeros_like(begin)
    key_counts = (begin + chunk - first_key).ravel()
    cu_keys = np.append(0, np.cumsum(key_counts))
    cu_queries = np.append(0, np.cumsum(np.repeat(chunk, len(numbers))))
    places = np.repeat((cu_whole[:-1, None] + first_key).ravel() - cu_keys[:-1], key_counts) + np.arange(cu_keys[-1])
    keys = np.argsort(_gathered_positions(tokens, cp_size))[keys[places]]
    query_counts, parts, first = np.diff(cu_queries), [], 0
    while first < len(key_counts):
        last = int(np.searchsorted(cu_keys, cu_keys[first] + MOST_COPIES * cu[-1], "right")) - 1
        own = slice(first, max(last, first + 1))
        of_part = [(x[first : own.stop + 1] - x[first]).astype(np.int32) for x in (cu_queries, cu_keys)]
        arrays = *of_part, keys[cu_keys[first] : cu_keys[own.stop]]
        of_queries, of_keys, rows = (to_device(torch.from_numpy(x), device) for x in arrays)
        segmented = of_queries, of_keys, int(query_counts[own].max()), int(key_counts[own].max())
        queries = slice(int(cu_queries[first]), int(cu_queries[own.stop]))
        parts.append((queries, segmented, RowCopies(rows, int(cu[-1]))))
        first = own.stop
    return parts


@lru_cache(maxsize=8)
def visible_keys(
    cu_seqlens: tuple[int, ...],
    cp_size: int,
    cp_rank: int,
    left: int,
    device: torch.device,
    shared: SharedPrompts | None = None,
) -> MaskMod:
    """Build the mask of soft-capped attention for a rank's queries and the gathered keys; ``left`` as in `Varlen`.

    A query sees the keys of its own sequence and, with ``shared``, those of its ancestors: a sequence and its
    descendants have numbers in a row. Of these keys it sees those at its own position or before.
    """
    cu = np.array(cu_seqlens)
    sequence = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
    last, position = np.arange(len(cu) - 1), np.arange(cu[-1]) - cu[sequence]  # last: descendant
    if shared is not None:
        of_leaves, nodes = shared.paths()
        np.maximum.at(last, nodes, shared.leaves[of_leaves])
        position = shared.position_ids
    queries, keys = zigzag(cu, cp_size, cp_rank), _gathered_positions(cu, cp_size)
    arrays = sequence[queries], position[queries], sequence[keys], last[sequence[keys]], position[keys]
    own, place, first, after, before = (to_device(torch.from_numpy(x), device) for x in arrays)

    def mask_mod(batch, head, query, key):
        is_ancestor = (first[key] <= own[query]) & (own[query] <= after[key])
        seen = is_ancestor & (before[key] <= place[query])
        return seen if left < 0 else seen & (place[query] - left <= before[key])

    return mask_mod
