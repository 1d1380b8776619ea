"""Attention of decode steps over vLLM's paged cache: a program for each head of keys and values and part of a sequence.

A sequence of a decode step has one query, so that attention reads keys and values once and is limited by memory.
FlashAttention 3 reaches 1.8 to 3.3 TB/s of an H200's 4.8 with sequences of some hundred tokens, this kernel 2.9 to 4.2
(docs/performance/rollouts.md). A product has 16 rows, of which the queries of one head of keys fill 1 to 16: neighbors
that have a part in the same blocks, as the completions of a group their prompt, fill others and read the part once.
FlashAttention keeps batches of few sequences, by their times on the engine's GPU (`decode_choice`), and all that is not
a plain decode step.
"""

import torch
import triton
import triton.language as tl
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from megatron_grpo.rollout.vllm.decode_choice import Choice, Measurement, fixed_rule, sizes_of

UNDIVIDED = 1024  # an engine divides its sequences if they can have more tokens
PART, MOST_PARTS = 512, 32  # tokens of a sequence that a program reads, so that none works much longer than others
ROWS = 16  # least queries of a product
SIXTEEN_BITS, EIGHT_BITS = (64, 3, 2), (32, 4, 1)  # keys of a product, products loaded ahead, warps: by H200s
LOG2_E = 1.4426950408889634
QUANTIZED = ("fp8", "fp8_e4m3")  # dtypes of a cache; queries are quantized, too


def register(longest_prompt: int) -> None:
    """Let vLLM's backend FLASH_ATTN use this kernel, by vLLM's own way to replace a backend's class.

    ``longest_prompt``: tokens of a prompt that completions can share.
    """
    DecodeMetadataBuilder.longest_prompt = longest_prompt
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{DecodeAttentionBackend.__name__}")


class DecodeMetadataBuilder(FlashAttentionMetadataBuilder):
    """What FlashAttention plans; a CUDA graph of this kernel serves no batch with a prompt, as one of theirs may."""

    longest_prompt = 0
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    _has_chosen = False

    def build_for_cudagraph_capture(self, common_attn_metadata):
        """Return the metadata of a batch that a CUDA graph is about to record; choose a kernel before the first one.

        vLLM calls this on all ranks of an engine alike, with the caches in place, outside of the recording.
        """
        if not self._has_chosen and common_attn_metadata.max_query_len == 1:
            self._has_chosen = True
            self._choose(common_attn_metadata)
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def _choose(self, common) -> None:
        """Measure both kernels for the layers that can have ours, and note the choice there."""
        every = (self.compilation_config.static_forward_context[name] for name in self.layer_names)
        layers = [layer for layer in every if isinstance(layer.impl, DecodeAttention) and layer.impl.choice is not None]
        if not layers or self.dcp_world_size > 1:
            return
        dtype, impl = self.vllm_config.model_config.dtype, layers[0].impl
        of_queries = current_platform.fp8_dtype() if impl.kv_cache_dtype in QUANTIZED else dtype
        sizes = self.compilation_config.cudagraph_capture_sizes or []
        usual = self.longest_prompt // 2  # tokens of a prompt
        shared = usual if self.vllm_config.cache_config.enable_prefix_caching and usual >= PART else 0

        def rows(number: int) -> torch.Tensor:
            return torch.zeros(number, impl.num_heads, impl.head_size, dtype=dtype, device=self.device)

        choice = Measurement(
            layers=[layer for layer in layers if layer.impl.num_heads == impl.num_heads],
            kernels=(_by_flash_attention, _by_ours),
            query=lambda number: rows(number).to(of_queries),
            output=rows,
            build=lambda batch: self.build(0, batch),
            common=common,
            sizes=sizes_of(sizes, self.vllm_config.scheduler_config.max_num_seqs),
            group=get_tp_group().cpu_group,
            shared=shared,
        ).choose()
        for layer in layers:
            layer.impl.choice = choice


class DecodeAttentionBackend(FlashAttentionBackend):
    """FlashAttention with this kernel for decode steps."""

    @staticmethod
    def get_builder_cls() -> type["DecodeMetadataBuilder"]:
        """Return the class that plans a batch."""
        return DecodeMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type["DecodeAttention"]:
        """Return the class of a layer's attention."""
        return DecodeAttention

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Return the layout in which the tokens of a block and head lie together; FlashAttention gains by it, too."""
        return "HND"


class DecodeAttention(FlashAttentionImpl):
    """Attention of a layer; ``choice`` is None if FlashAttention computes all of it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        is_plain = (
            self.attn_type == AttentionType.DECODER
            and self.alibi_slopes is None
            and self.sliding_window == (-1, -1)
            and not self.logits_soft_cap
            and self.sinks is None
            and self.kv_cache_dtype in ("auto", "bfloat16", "float16", *QUANTIZED)
            and self.head_size in (64, 128, 256)
            and self.num_queries_per_kv <= ROWS
            and not self.batch_invariant_enabled
        )
        self.choice: Choice | None = None
        if is_plain:
            self.choice = fixed_rule(self.num_kv_heads, "no CUDA graphs of steps with one token of a sequence")

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *of_output, **options):
        """Write the attention of a batch into ``output``."""
        meta = attn_metadata
        if (
            self.choice is None
            or meta is None
            or meta.max_query_len != 1
            or meta.use_cascade
            or self.dcp_world_size > 1
            or len(meta.seq_lens) < self.choice.least
            or any(scale is not None for scale in (*of_output, *options.values()))
        ):
            return super().forward(layer, query, key, value, kv_cache, meta, output, *of_output, **options)
        return self.decode(layer, query, kv_cache, meta, output)

    def decode(self, layer, query, kv_cache, meta, output):
        """Write the attention of a decode step into ``output`` by our kernel."""
        scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if self.kv_cache_dtype in QUANTIZED:
            kv_cache = kv_cache.view(current_platform.fp8_dtype())
            scales = layer._q_scale, layer._k_scale, layer._v_scale
        parts = parts_of(meta.max_seq_len)  # in a CUDA graph of the longest sequence that there can be
        decode_attention(query, kv_cache, meta.block_table, meta.seq_lens, output, self.scale, scales, *parts)
        return output


def _by_flash_attention(layer, query, meta, output) -> None:
    FlashAttentionImpl.forward(layer.impl, layer, query, None, None, layer.kv_cache, meta, output)


def _by_ours(layer, query, meta, output) -> None:
    layer.impl.decode(layer, query, layer.kv_cache, meta, output)


def parts_of(longest: int) -> tuple[int, int]:
    """Return into how many parts a sequence of ``longest`` tokens is divided, and the tokens of a part."""
    part = max(PART, triton.next_power_of_2(longest) // MOST_PARTS)
    return (1, UNDIVIDED) if longest <= UNDIVIDED else (triton.cdiv(longest, part), part)


def decode_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    parts: int = 1,
    part: int = PART,
) -> None:
    """Write the attention of one query for each sequence into ``output`` ``[n, heads, d]``; 0 for one of no tokens.

    ``query`` ``[n, heads, d]``; ``cache`` ``[blocks, groups, tokens, 2 d]``: keys, then values; ``blocks``
    ``[n, most]`` are the numbers of a sequence's blocks, ``lengths`` ``[n]`` its tokens. ``scales`` of queries, keys
    and values in 8 bits: float32, one number each. No sequence has more than ``parts`` times ``part`` tokens.
    """
    groups, size, width = cache.shape[1:]
    heads, d, rows = query.shape[-2], width // 2, min(len(query), len(lengths))
    if parts > 1:  # of each head and part: the sum of weighted values, the largest score, the sum of weights
        found = torch.empty(rows, heads, parts, d, dtype=torch.float32, device=query.device)
        sums = torch.empty(2, rows, heads, parts, dtype=torch.float32, device=query.device)
    else:
        found = sums = lengths  # unused
    keys, ahead, warps = SIXTEEN_BITS if scales is None else EIGHT_BITS
    members = max(1, ROWS // triton.next_power_of_2(heads // groups)) if parts > 1 else 1
    covered = part // size + (2 if part % size else 0)  # blocks with tokens of a part
    _attention[(groups, rows, parts)](
        query, cache, blocks, lengths, output, found, sums, scale * LOG2_E, *(scales or (lengths,) * 3),
        query.stride(0), output.stride(0), cache.stride(0), cache.stride(1), cache.stride(2), blocks.stride(0),
        HEADS=heads // groups, MEMBERS=members, ROWS=ROWS, D=d, BLOCK=size, COVERED=triton.next_power_of_2(covered),
        KEYS=keys, AHEAD=ahead, PART=part, PARTS=parts, SCALED=scales is not None, num_warps=warps,
    )  # fmt: skip
    if parts > 1:
        _combine[(heads, rows)](
            found, sums, lengths, output, output.stride(0), D=d, PART=part, PARTS=parts,
            WIDTH=triton.next_power_of_2(parts), num_warps=1,
        )  # fmt: skip


@triton.jit
def _in_float16(numbers):
    """Return numbers of 8 bits (e4m3) in float16, which holds them exactly: a product with weights needs them.

    Triton moves its own conversion behind the exchange of a product's operand between threads, which then reads the
    numbers byte by byte; it may not move this one.
    """
    return tl.inline_asm_elementwise(
        "{.reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;}",
        "=r,=r,r", [numbers], dtype=tl.float16, is_pure=False, pack=4,
    )  # fmt: skip


@triton.jit
def _attention(
    query, cache, blocks, lengths, output, found, sums, scale, query_scale, key_scale, value_scale, query_row,
    output_row, cache_block, cache_group, cache_token, blocks_row, HEADS: tl.constexpr, MEMBERS: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, COVERED: tl.constexpr, KEYS: tl.constexpr,
    AHEAD: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Attend from a sequence to a part of its tokens, and from the neighbors that have the same blocks there."""
    group, sequence, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + sequence)
    first, last = 0, length
    if PARTS > 1:
        first = part * PART
        last = tl.minimum(length, first + PART)
        if (part > 0) & (first >= length):
            return
    d, ahead = tl.arange(0, D), tl.arange(0, KEYS)
    rows = tl.arange(0, ROWS)
    member, head = rows // (ROWS // MEMBERS), rows % (ROWS // MEMBERS)
    near = sequence // MEMBERS * MEMBERS
    bit = 1 << (sequence - near).to(tl.int32)
    alike = bit  # of the neighbors, those with the same blocks in a part that all of them have in full
    if MEMBERS > 1:
        full = tl.maximum(first, 1) + PART  # one that ends with the first part has nothing to combine
        if length >= full:
            covered, each = first // BLOCK + tl.arange(0, COVERED), tl.arange(0, MEMBERS)
            inside = covered <= (first + PART - 1) // BLOCK
            own_blocks = tl.load(blocks + sequence * blocks_row + covered, mask=inside, other=0)
            others = near + each
            whole = tl.load(lengths + others, mask=others < tl.num_programs(1), other=0) >= full
            compared = whole[:, None] & inside[None, :]
            theirs = tl.load(blocks + others[:, None] * blocks_row + covered[None, :], mask=compared, other=-1)
            same = tl.min(((theirs == own_blocks[None, :]) | ~inside[None, :]).to(tl.int32), 1)
            alike = tl.sum(same << each)
            if alike & (bit - 1):
                return  # the first of them attends for all
    reads, readers = (head < HEADS) & ((alike >> member) & 1 > 0), near + member
    here = reads[:, None]
    own = (group * HEADS + head)[:, None] * D + d[None, :]
    queries = tl.load(query + readers[:, None] * query_row + own, mask=here, other=0.0)
    if SCALED:
        scale *= tl.load(query_scale) * tl.load(key_scale)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, D], tl.float32)
    for start in tl.range(first, last, KEYS, num_stages=AHEAD):
        at = start + ahead
        held = at < last
        block = tl.load(blocks + sequence * blocks_row + at // BLOCK, mask=held, other=0).to(tl.int64)
        place = cache + block * cache_block + group * cache_group + (at % BLOCK) * cache_token
        if (PARTS > 1) & (not SCALED):  # a mask takes registers; what lies behind the end gets no score
            keys = tl.load(place[:, None] + d[None, :])
        else:
            keys = tl.load(place[:, None] + d[None, :], mask=held[:, None], other=0.0)
        values = tl.load(place[:, None] + D + d[None, :], mask=held[:, None], other=0.0)
        if SCALED:
            values = _in_float16(values)
        scores = tl.where(held[None, :], tl.dot(queries, tl.trans(keys)) * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights, keep = tl.exp2(scores - higher[:, None]), tl.exp2(peak - higher)
        total = total * keep + tl.sum(weights, 1)
        weighted = weighted * keep[:, None] + tl.dot(weights.to(values.dtype), values)
        peak = higher
    if SCALED:
        weighted *= tl.load(value_scale)
    undivided = reads
    if PARTS > 1:
        at = (readers * tl.num_programs(0) * HEADS + group * HEADS + head) * PARTS + part
        number = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * HEADS * PARTS
        divided = reads & (length > PART)
        tl.store(found + at[:, None] * D + d[None, :], weighted, mask=divided[:, None])
        tl.store(sums + at, peak, mask=divided)
        tl.store(sums + number + at, total, mask=divided)
        undivided = reads & (length <= PART)
    weighted = weighted / tl.where(length > 0, total, 1.0)[:, None]
    place = output + readers[:, None] * output_row + own
    tl.store(place, weighted.to(output.dtype.element_ty), mask=undivided[:, None])


@triton.jit
def _combine(
    found, sums, lengths, output, output_row, D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the output of a head of each sequence that has several parts."""
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    if length <= PART:
        return
    parts, d = tl.arange(0, WIDTH), tl.arange(0, D)
    held = parts * PART < length
    at = (sequence * tl.num_programs(0) + head) * PARTS + parts
    peaks = tl.load(sums + at, mask=held, other=float("-inf"))
    totals = tl.load(sums + tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * PARTS + at, mask=held, other=0.0)
    weights = tl.exp2(peaks - tl.max(peaks, 0))
    values = tl.load(found + at[:, None] * D + d[None, :], mask=held[:, None], other=0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.sum(totals * weights, 0)
    tl.store(output + sequence * output_row + head * D + d, result.to(output.dtype.element_ty))
