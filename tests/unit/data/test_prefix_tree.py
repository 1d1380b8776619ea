"""Common prefixes of sequences, against comparisons of every pair, token by token."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.data.batch import offsets
from megatron_grpo.data.prefix_tree import (
    as_bytes,
    common_prefixes,
    hashed_prefixes,
    prefix_hashes,
    prefix_tree,
    shareable_tokens,
    spared_tokens,
)
from megatron_grpo.parallel.zigzag import padded_lengths, sequence_multiple


def in_common(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@st.composite
def forests(draw, longest: int = 6) -> list[list[int]]:
    """Sequences that go on from prefixes of others: up to 6 levels and 8 branches, duplicates, and empty leaves."""
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, 9))):
        begin = draw(st.sampled_from(sequences)) if sequences and draw(st.booleans()) else []
        begin = begin[: draw(st.integers(0, len(begin)))]
        more = draw(st.lists(st.integers(0, 300), max_size=longest))
        sequences.append([*begin, *more] or [7])
    return sequences


def arrays(sequences: list[list[int]]):
    return as_bytes(np.concatenate(sequences).astype(np.int32)), offsets(np.array([len(s) for s in sequences]))


@settings(deadline=None, max_examples=300)
@given(sequences=forests(), cp_size=st.sampled_from([1, 2]))
def test_paths_are_the_sequences_and_share_what_each_pair_has_in_common(sequences, cp_size):
    rows, cu = arrays(sequences)
    lengths, prefixes = np.diff(cu), common_prefixes(rows, cu)
    tree = prefix_tree(lengths, prefixes.order, shareable_tokens(prefixes.common, cp_size))
    multiple = sequence_multiple(cp_size)
    elements, paths = [], []
    for number, sequence in enumerate(sequences):
        node, tokens, path = int(tree.leaf[number]), [], []
        while node >= 0:
            assert node > tree.parent[node]
            first = tree.depth[node]
            tokens = sequences[tree.source[node]][first : first + tree.lengths[node]] + tokens
            path = [(node, k) for k in range(tree.lengths[node])] + path
            node = int(tree.parent[node])
        assert tokens == sequence
        elements += path
        paths.append(path)
    assert len(set(elements)) == tree.lengths.sum()  # each node belongs to a sequence
    for (a, one), (b, other) in combinations(zip(sequences, paths, strict=True), 2):
        assert len(set(one) & set(other)) == max(in_common(a, b) - 1, 0) // multiple * multiple
    inner = np.delete(np.arange(len(tree.parent)), tree.leaf)
    assert (tree.lengths[inner] % multiple == 0).all() and (tree.lengths > 0).all()
    assert len(np.unique(tree.leaf)) == len(sequences)
    spared = shareable_tokens(prefixes.common, cp_size).sum()
    assert padded_lengths(tree.lengths, cp_size).sum() == padded_lengths(lengths, cp_size).sum() - spared
    if cp_size == 1:
        assert spared == lengths.sum() - len(set(elements))


@settings(deadline=None, max_examples=200)
@given(sequences=forests(30), data=st.data())
def test_hashes_give_lower_bounds_that_are_exact_for_prompts(sequences, data):
    prompts = [data.draw(st.integers(1, len(sequence))) for sequence in sequences]
    of_prompts = np.array(prompts)
    hashes = np.stack([prefix_hashes(as_bytes(np.array(s, np.int32)), p) for s, p in zip(sequences, prompts)])
    found = hashed_prefixes(hashes, of_prompts)
    place = np.argsort(found.order)
    for i, j in combinations(range(len(sequences)), 2):
        between = found.common[min(place[i], place[j]) + 1 : max(place[i], place[j]) + 1].min()
        assert between <= in_common(sequences[i], sequences[j])
        assert hashed_prefixes(hashes[[i, j]], of_prompts[[i, j]]).common[1] == between  # of any subset
        if prompts[i] == prompts[j] <= in_common(sequences[i], sequences[j]):
            assert between >= prompts[i]
    for number, (this, before) in enumerate(zip(found.order[1:], found.order, strict=False), start=1):
        a, b = sequences[this], sequences[before]
        known = max(n for n in (0, 16, 23, 32, 45, 64) if n <= in_common(a, b))
        if prompts[this] == prompts[before]:
            assert found.common[number] >= known
    groups = data.draw(st.lists(st.integers(0, 1), min_size=len(sequences), max_size=len(sequences)))
    apart = hashed_prefixes(hashes, of_prompts, np.array(groups))
    for number, (this, before) in enumerate(zip(apart.order[1:], apart.order, strict=False), start=1):
        most = in_common(sequences[this], sequences[before])
        assert apart.common[number] <= most * (groups[this] == groups[before])


@settings(deadline=None, max_examples=100)
@given(
    depths=st.lists(st.integers(0, 700), min_size=1, max_size=12),
    cp_size=st.sampled_from([1, 2, 4]),
)
def test_short_runs_after_long_paths_are_left_out(depths, cp_size):
    """Each sequence goes on from so many tokens of the one before; a node has more than 1 / 64 of its path."""
    sequences = [list(range(700))]
    for number, depth in enumerate(depths, start=1):
        sequences.append([*sequences[-1][:depth], *(1000 * number + k for k in range(701 - depth))])
    rows, cu = arrays(sequences)
    lengths, prefixes = np.diff(cu), common_prefixes(rows, cu)
    tree = prefix_tree(lengths, prefixes.order, shareable_tokens(prefixes.common, cp_size))
    inner = np.delete(np.arange(len(tree.parent)), tree.leaf)
    assert (64 * tree.lengths[inner] > (tree.depth + tree.lengths)[inner] - 64).all()
    spared = padded_lengths(lengths, cp_size).sum() - padded_lengths(tree.lengths, cp_size).sum()
    assert spared_tokens(prefixes.common, cp_size).sum() <= spared <= shareable_tokens(prefixes.common, cp_size).sum()
