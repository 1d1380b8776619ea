"""Common prefixes of token sequences: which ones a pack computes once, and how many tokens that spares.

Sequences in the order of their tokens have the longest common prefix with their neighbour, and any two of them have the
smallest of those between them in common. The order, and a number for each pair of neighbours, thus describe all common
prefixes: `prefix_tree` turns them into nodes for a pack, and the schedule adds up what a set of completions spares.

A node of ``d`` tokens is followed by sequences that begin with their own copy of the last common token, because that
token predicts the next one. ``d`` is a multiple of `sequence_multiple`, so that padding stands at the end of a sequence
only, and the padded tokens of a pack are those of separate sequences without the spared ones.
"""

import hashlib
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_grpo.data.batch import Int64, RolloutBatch, UInt8
from megatron_grpo.parallel.zigzag import sequence_multiple

# Lengths of the prefixes that `prefix_hashes` describes, 16 to 2^20 tokens in steps of sqrt(2).
HASHED_LENGTHS = np.round(16 * 2 ** (np.arange(33) / 2)).astype(np.int64)
# A run of tokens is a node if it is longer than this part of its path. With context parallelism the queries of a node
# have a copy of the path's keys, and a recurrent layer has a call for each level of the tree, which costs more than a
# token or two that several completions have in common after a long prompt.
WORTH = 64
# An update shares nothing if it would share less than this part of its tokens. Attention over trees copies the keys of
# all tokens twice and sums their gradients: by its bytes 1 to 4 % of an update on a GPU (4B, 0.6B).
LEAST_SHARE = 16


class Prefixes(NamedTuple):
    """The common prefixes of n sequences."""

    order: Int64  # [n], the sequences in an order in which neighbours have the longest prefixes in common
    common: Int64  # [n], tokens in common with the one before, in this order; 0 of the first


class PrefixTree(NamedTuple):
    """Sequences as paths in a forest of m nodes, which are runs of tokens, in depth-first order."""

    parent: Int64  # [m], -1: none
    depth: Int64  # [m], tokens of all ancestors
    lengths: Int64  # [m], tokens of the node itself
    source: Int64  # [m], a sequence with these tokens, from the position ``depth`` on
    leaf: Int64  # [n], the node in which each sequence ends


def shareable_tokens(common: npt.NDArray[np.integer], cp_size: int = 1) -> Int64:
    """Return the tokens that a pack computes once for sequences with so many tokens in common, [n]."""
    multiple = sequence_multiple(cp_size)
    return np.maximum(common.astype(np.int64) - 1, 0) // multiple * multiple


def spared_tokens(common: npt.NDArray[np.integer], cp_size: int = 1) -> Int64:
    """Return the tokens that a pack computes once at least, [n]: without the runs that `prefix_tree` leaves out."""
    shared, multiple = shareable_tokens(common, cp_size), sequence_multiple(cp_size)
    return (shared - shared // WORTH) // multiple * multiple


def is_worth_sharing(spared: int, total: int) -> bool:
    """Return whether an update of ``total`` tokens shares prefixes if that spares ``spared`` of them."""
    return spared * LEAST_SHARE >= total


def spared_by_samples(repeated: Int64, samples: npt.NDArray[np.integer], cp_size: int = 1) -> Int64:
    """Return the tokens that a pack computes once at least among the samples of each completion, [n].

    ``repeated`` [n]: the sums of `shareable_tokens` for ``samples`` [n] sequences, without context parallelism.
    """
    multiple = sequence_multiple(cp_size)
    least = repeated - -(-repeated // WORTH) - (samples - 1) * 2 * (multiple - 1)  # `spared_tokens` rounds down twice
    return np.maximum(least, 0) // multiple * multiple


def as_bytes(values: npt.NDArray) -> UInt8:
    """Return the rows of an array [n, ...] as bytes, [n, bytes of a row]."""
    row = values.dtype.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(len(values), row)


def token_rows(batch: RolloutBatch, flat: Int64, begins: Int64) -> UInt8:
    """Return the tokens at ``flat`` [N], each with the experts that the one before it replays, as bytes [N, ...].

    The last token in common has copies (see the module), which may have experts of their own. ``begins``: which of the
    tokens are the first of a sequence.
    """
    columns: list[npt.NDArray] = [batch.tokens[flat]]
    if batch.routed_experts is not None:
        before = np.roll(batch.routed_experts[flat], 1, axis=0)
        before[begins] = -1
        columns.append(before)
    return np.concatenate([as_bytes(column) for column in columns], axis=1)


def _hashed_rows(batch: RolloutBatch, start: int, end: int, begins: Int64) -> UInt8:
    """Return `token_rows` of the tokens from ``start`` to ``end``, with a hash of 8 bytes for the experts of each.

    A token has up to 1,000 bytes of experts: too many for `prefix_hashes`, which is of every rollout.
    """
    rows = as_bytes(batch.tokens[start:end])
    if batch.routed_experts is None:
        return rows
    experts = as_bytes(batch.routed_experts[start:end])
    words = np.pad(experts, ((0, 0), (0, -experts.shape[1] % 8))).view(np.uint64)
    factors = np.random.default_rng(0).integers(2**63, size=words.shape[1], dtype=np.uint64) * 2 + 1
    before = np.roll(words @ factors, 1)
    before[begins] = 0
    return np.concatenate([rows, as_bytes(before)], axis=1)


def common_prefixes(rows: UInt8, cu_seqlens: Int64) -> Prefixes:
    """Return the common prefixes of n sequences.

    ``rows`` [total, bytes] are their tokens; ``cu_seqlens`` [n + 1] says where each sequence begins.
    """
    width, flat, bounds = rows.shape[1], rows.reshape(-1), list(pairwise(cu_seqlens.tolist()))
    raw = rows.tobytes()
    order = sorted(range(len(bounds)), key=[raw[a * width : b * width] for a, b in bounds].__getitem__)
    common = np.zeros(len(order), np.int64)
    for place, (before, this) in enumerate(pairwise(order), start=1):
        (a, a_end), (b, b_end) = bounds[before], bounds[this]
        size = min(a_end - a, b_end - b)
        differ = flat[a * width : (a + size) * width] != flat[b * width : (b + size) * width]
        first = int(differ.argmax()) if size else 0
        common[place] = first // width if size and differ[first] else size
    return Prefixes(np.array(order, np.int64), common)


def prefix_tree(lengths: Int64, order: Int64, shared: Int64) -> PrefixTree:
    """Return the tree of sequences of ``lengths`` [n].

    Neighbours in ``order`` [n] have the first ``shared`` [n] tokens in common, fewer than either has. They have them as
    ancestors, but for runs that are too short (`WORTH`).
    """
    inner: list[list[int]] = [[] for _ in order]  # by the place of the first sequence: depths of the nodes' ends
    last: list[list[int]] = [[] for _ in order]  # of the same nodes the place after the last sequence
    stack = [(0, 0)]  # (depth of the end, first place) of the nodes that are open
    for place, depth in enumerate([*shared[1:].tolist(), 0][: len(order)], start=1):
        first = place - 1
        while stack[-1][0] > depth:
            end, first = stack.pop()
            inner[first].append(end)
            last[first].append(place)
        if stack[-1][0] < depth:
            stack.append((depth, first))
    nodes: list[tuple[int, int, int, int]] = []  # parent, depth, length, source
    leaf = np.empty(len(order), np.int64)
    path = [(0, len(order), -1)]  # (depth of the end, place after the last sequence, number) of a place's ancestors
    for place, sequence in enumerate(order.tolist()):
        while path[-1][1] <= place:
            path.pop()
        for end, after in zip(reversed(inner[place]), reversed(last[place]), strict=True):  # the shallowest came last
            depth, _, parent = path[-1]
            if end - depth > end // WORTH:
                path.append((end, after, len(nodes)))
                nodes.append((parent, depth, end - depth, sequence))
        depth, _, parent = path[-1]
        leaf[sequence] = len(nodes)
        nodes.append((parent, depth, int(lengths[sequence]) - depth, sequence))
    columns = np.array(nodes, np.int64).reshape(-1, 4).T
    return PrefixTree(columns[0], columns[1], columns[2], columns[3], leaf)


def prefix_hashes(rows: UInt8, prompt: int) -> Int64:
    """Return hashes of a sequence's first tokens, [35]: of `HASHED_LENGTHS`, -1 if it is shorter, and of its prompt."""
    hashes = np.full(len(HASHED_LENGTHS) + 1, -1)
    content, done = hashlib.blake2b(digest_size=8), 0
    for number, length in enumerate(length for length in HASHED_LENGTHS.tolist() if length <= len(rows)):
        content.update(rows[done:length].tobytes())
        hashes[number], done = _number(content), length
    hashes[-1] = _number(hashlib.blake2b(rows[:prompt].tobytes(), digest_size=8))
    return hashes


def _number(content: hashlib.blake2b) -> int:
    return int.from_bytes(content.digest(), "little") >> 1  # not negative as int64


def hashed_prefixes(hashes: Int64, prompt_lengths: npt.NDArray[np.integer], apart: Int64 | None = None) -> Prefixes:
    """Return common prefixes by their `prefix_hashes` [n, 35]: two sequences have at least so many tokens in common.

    Exact for sequences that differ right after their common prompt. ``apart`` [n]: sequences with different values have
    nothing in common.
    """
    prompts = prompt_lengths.astype(np.int64)[:, None]
    lengths = np.concatenate([np.broadcast_to(HASHED_LENGTHS, (len(hashes), len(HASHED_LENGTHS))), prompts], 1)
    ascending = np.argsort(lengths, axis=1, kind="stable")
    lengths, keys = (np.take_along_axis(values, ascending, 1) for values in (lengths, hashes))
    different = -1 - np.arange(len(keys))[:, None]
    keys = np.where(keys < 0, different, keys)
    if apart is not None:
        keys, lengths = np.insert(keys, 0, apart, axis=1), np.insert(lengths, 0, 0, axis=1)
    order = np.lexsort(keys.T[::-1])
    equal = np.logical_and.accumulate(keys[order[1:]] == keys[order[:-1]], axis=1).sum(1)
    known = np.insert(lengths, 0, 0, axis=1)[order[1:]]
    common = np.take_along_axis(known, equal[:, None], 1)[:, 0]
    return Prefixes(order, np.insert(common, 0, 0)[: len(order)])


def with_prefixes(batch: RolloutBatch) -> RolloutBatch:
    """Return the batch with `prefix_hashes` and `repeated_tokens`; this rank holds all of its tokens.

    The hashes describe the first sequence of each completion.
    """
    if batch.prefix_hashes is not None:
        return batch
    bounds = batch.cu_seqlens.tolist()
    hashes = np.empty((batch.num_completions, len(HASHED_LENGTHS) + 1), np.int64)
    repeated = np.zeros(batch.num_completions, np.int64)
    for i, (start, end) in enumerate(pairwise(bounds)):
        starts = [] if batch.sample_starts is None else np.flatnonzero(batch.sample_starts[start:end]).tolist()
        cu = np.array([0, *starts, end - start])
        rows = _hashed_rows(batch, start, end, cu[:-1])
        hashes[i] = prefix_hashes(rows[: cu[1]], int(batch.prompt_lengths[i]))
        if starts:
            repeated[i] = shareable_tokens(common_prefixes(rows, cu).common).sum()
    return replace(batch, prefix_hashes=hashes, repeated_tokens=repeated)
