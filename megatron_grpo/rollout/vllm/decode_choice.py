"""Choice of the attention kernel of an engine's decode steps: ours from some number of sequences on, by its times.

Before an engine records its CUDA graphs, both kernels attend over the layers' own caches, with made-up lengths and
blocks in any order. Each runs as in a decode step: the same metadata, in a CUDA graph. If an engine keeps prefixes,
neighbors also share the blocks of a long prompt, as the completions of a group do.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo.rollout.vllm.cuda_graph import record

LEAST_PROGRAMS = 256  # of the fixed rule: fewer do not fill a GPU
GAIN = 0.03  # least share of FlashAttention's time that our kernel saves: less may be noise
MEAN = 512  # tokens
SPREADS = 1.0, 0.25  # of lengths over their mean: requests follow one another, or began together
GROUP = 8  # neighbors that share a prompt
BESIDE = 32  # sequences; from here on the next larger graph is measured, too
ROUNDS = 3
READ, LEAST_LAYERS = 256 << 20, 2  # bytes that a graph reads, more than a GPU caches; layers in it

Attend = Callable[[Any, torch.Tensor, Any, torch.Tensor], Any]  # (layer, query, metadata, output)


@dataclass(frozen=True)
class Choice:
    """Decode steps of ``least`` and more sequences attend by our kernel; infinite: none does."""

    least: float
    why: str

    def __str__(self) -> str:
        if self.least == math.inf:
            kernel = "FlashAttention"
        elif self.least <= 1:
            kernel = "our kernel"
        else:
            kernel = f"our kernel from {self.least} sequences on, FlashAttention below"
        return f"attention of decode steps: {kernel} ({self.why})"


def fixed_rule(key_heads: int, why: str) -> Choice:
    """Return the choice for ``key_heads`` heads of keys on a GPU without times."""
    return Choice(-(-LEAST_PROGRAMS // key_heads), f"a fixed rule: {why}")


def by_times(sizes: Sequence[int], theirs: Sequence[float], ours: Sequence[float]) -> Choice:
    """Return the choice by seconds of FlashAttention and of our kernel for each of the rising ``sizes``.

    Our kernel must be faster for a size and for all larger ones.
    """
    least: float = math.inf
    for size, flash, own in reversed(list(zip(sizes, theirs, ours, strict=True))):
        if own > (1 - GAIN) * flash:
            break
        least = size
    ratios = [f"{size}: {own / flash:.2f}" for size, flash, own in zip(sizes, theirs, ours, strict=True)]
    return Choice(least, f"our time over FlashAttention's, by sequences: {', '.join(ratios)}")


def sizes_of(recorded: Sequence[int], most: int) -> list[int]:
    """Return the numbers of sequences to measure, of the graphs of at most ``most``: powers of two and the largest.

    Programs of FlashAttention that fill a GPU once with 64 sequences take twice as long with 72: from `BESIDE` on the
    graph above each power of two is measured, too.
    """
    held = sorted(size for size in recorded if 1 <= size <= most)

    def is_power(size: int) -> bool:
        return size & (size - 1) == 0

    return [
        size
        for below, size in pairwise([0, *held])
        if is_power(size) or (below >= BESIDE and is_power(below)) or size == held[-1]
    ]


def mean_lengths(longest: int) -> list[int]:
    """Return the mean lengths to measure, in tokens; the engine's longest sequence has ``longest``."""
    return sorted({max(1, longest // 4), min(MEAN, max(1, longest // 2))})


def lengths_of(number: int, mean: int, spread: float) -> torch.Tensor:
    """Return ``number`` lengths in any order ``[number]``, even between ``mean`` times 1 - ``spread`` and 1 + it."""
    place = (torch.arange(number) + 0.5) / number
    lengths = (mean * (1 - spread + 2 * spread * place)).ceil().int()
    return lengths[torch.randperm(number, generator=torch.Generator().manual_seed(0))]


def made_up_blocks(lengths: torch.Tensor, size: int, most: int, shared: int = 0) -> torch.Tensor:
    """Return the numbers of the blocks of ``size`` tokens of sequences of these lengths ``[n]``, ``[n, most]``.

    They are the first of a cache, in any order; those of the first ``shared`` tokens are the same in `GROUP` neighbors.
    """
    number, common = len(lengths), shared // size
    filled = torch.arange(most) < ((lengths + size - 1) // size)[:, None]
    filled[torch.arange(number) % GROUP > 0, :common] = False
    blocks = torch.zeros(number, most, dtype=torch.int32)
    blocks[filled] = torch.randperm(int(filled.sum()), generator=torch.Generator().manual_seed(0)).int()
    blocks[:, :common] = blocks[::GROUP, :common].repeat_interleave(GROUP, 0)[:number]
    return blocks


def made_up_batch(common: Any, lengths: torch.Tensor, size: int, shared: int = 0) -> Any:
    """Return vLLM's description of a decode step of sequences of these lengths ``[n]``, on the device of ``common``.

    Their blocks are those of `made_up_blocks`. The table of blocks has the strides of the one in ``common``, an
    engine's own description, so that kernels are compiled once.
    """
    table, number = common.block_table_tensor, len(lengths)
    held = table.new_zeros(number, table.stride(0))
    held[:, : table.shape[1]] = made_up_blocks(lengths, size, table.shape[1], shared)
    starts = torch.arange(number + 1, dtype=torch.int32)
    return type(common)(
        query_start_loc=starts.to(table.device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(table.device),
        num_reqs=number,
        num_actual_tokens=number,
        max_query_len=1,
        max_seq_len=common.max_seq_len,
        block_table_tensor=held[:, : table.shape[1]],
        slot_mapping=torch.zeros(number, dtype=torch.int64, device=table.device),
        seq_lens_cpu_upper_bound=lengths,
    )


def seconds_of(calls: Sequence[Callable[[], None]]) -> list[float]:
    """Return the least seconds of each of ``calls`` in a CUDA graph of its own; they take turns."""
    stream = torch.cuda.Stream()
    graphs = [record(call, stream) for call in calls]
    spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
    for turn in range(1 + ROUNDS):
        for graph, of_graph in zip(graphs, spans, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            if turn:  # the first one uploads the graph
                of_graph.append((begin, end))
    torch.cuda.synchronize()
    graphs.clear()
    torch.cuda.empty_cache()  # the next graphs cannot reuse the memory of these
    return [1e-3 * min(begin.elapsed_time(end) for begin, end in of_graph) for of_graph in spans]


@dataclass
class Measurement:
    """What an engine measures; ``build`` returns the metadata of a batch, and ``group`` is of the engine's ranks."""

    layers: Sequence[Any]  # each can attend by both kernels
    kernels: tuple[Attend, Attend]  # FlashAttention, ours
    query: Callable[[int], torch.Tensor]  # of a number of sequences
    output: Callable[[int], torch.Tensor]
    build: Callable[[Any], Any]
    common: Any  # the engine's own description of a batch
    sizes: Sequence[int]
    group: Any
    shared: int = 0  # tokens of a prompt that a group shares; 0: none
    seconds: Callable[[Sequence[Callable[[], None]]], list[float]] = seconds_of

    def choose(self) -> Choice:
        """Return the choice of all ranks in the group; by a fixed rule where one of them could not measure."""
        cache = self.layers[0].kv_cache
        blocks, key_heads = cache.shape[:2]
        if not self.sizes or blocks < 3 * max(self.sizes):  # as in the profile that vLLM makes before its cache
            return fixed_rule(key_heads, f"a cache of {blocks} blocks is too small to measure")
        times = torch.full((2, len(self.sizes)), math.inf, dtype=torch.float64)
        torch.cuda.empty_cache()  # an allocation within a capture cannot
        try:
            # The largest first: the others' buffers fit into its memory.
            for place, number in reversed(list(enumerate(self.sizes))):
                times[:, place] = self._seconds(number)
        except torch.OutOfMemoryError:
            times[:] = math.inf
        torch.cuda.empty_cache()
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(times, dist.ReduceOp.MAX, group=self.group)
        if not times.isfinite().all():
            return fixed_rule(key_heads, "there was no memory to measure")
        return by_times(self.sizes, *times.tolist())

    def _batches(self, number: int) -> list[tuple[torch.Tensor, int]]:
        """Return lengths ``[number]`` and shared tokens of the batches to measure; the cache holds each of them."""
        blocks, _, size, _ = self.layers[0].kv_cache.shape
        longest = self.common.max_seq_len
        held = (blocks // number - 2) * size  # tokens of a sequence on average, so that all fit
        means = sorted({min(mean, held) for mean in mean_lengths(longest)})
        batches = [(lengths_of(number, mean, spread), 0) for mean, spread in product(means, SPREADS)]
        mean = max(1, min(MEAN, held // 2, (longest - self.shared) // 2))  # of completions after a shared prompt
        left = blocks - number * (mean // size + 2)
        shared = min(self.shared // size, left // -(-number // GROUP)) * size
        if shared:
            batches += [(shared + lengths_of(number, mean, spread), shared) for spread in SPREADS]
        return batches

    def _seconds(self, number: int) -> torch.Tensor:
        """Return the seconds of FlashAttention and of ours with ``number`` sequences ``[2]``, summed over batches."""
        cache, found = self.layers[0].kv_cache, torch.zeros(2, dtype=torch.float64)
        _, heads, size, width = cache.shape
        query, output = self.query(number), self.output(number)
        for lengths, shared in self._batches(number):
            tokens = int(lengths.sum()) - shared * (number - -(-number // GROUP))
            layers = self.layers[: max(LEAST_LAYERS, -(-READ // (tokens * heads * width * cache.element_size())))]
            meta = self.build(made_up_batch(self.common, lengths, size, shared))

            def attend(kernel: Attend, layers=layers, meta=meta) -> None:
                for layer in layers:
                    kernel(layer, query, meta, output)

            for kernel in self.kernels:
                kernel(layers[0], query, meta, output)  # compiles it
            calls = [lambda kernel=kernel: attend(kernel) for kernel in self.kernels]
            found += torch.tensor(self.seconds(calls), dtype=torch.float64)
        return found
