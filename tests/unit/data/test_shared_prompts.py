"""Packs in which the completions of a group have one copy of their prompt: the sequences of the model are the same."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.pack import IGNORED_LABEL, pack_completions, shareable_tokens, shared_tokens
from megatron_grpo.data.schedule import schedule
from megatron_grpo.parallel.zigzag import padded_lengths, zigzag
from megatron_grpo.utils.errors import GrpoError


def batch_of(prompts: list[list[int]], completions: list[list[int]], group_ids: list[int]) -> RolloutBatch:
    n = len(group_ids)
    return RolloutBatch.from_completions(
        prompts=prompts,
        completions=completions,
        log_probs=[[-0.5] * len(completion) for completion in completions],
        weight_version=0,
        group_ids=group_ids,
        row_ids=group_ids,
        sample_ids=list(range(n)),
        finish_reasons=[FinishReason.STOP] * n,
    )


@st.composite
def batches(draw) -> RolloutBatch:
    groups = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    prompts = {group: [100 * group + i for i in range(draw(st.integers(1, 20)))] for group in sorted(set(groups))}
    lengths = draw(st.lists(st.integers(0, 5), min_size=len(groups), max_size=len(groups)))
    completions = [[1000 + 10 * i + k for k in range(length)] for i, length in enumerate(lengths)]
    return batch_of([prompts[group] for group in groups], completions, groups)


def test_by_hand():
    """Two completions of the prompt 10 11 12, and one of 20 21 alone, with two tokens of padding."""
    batch = batch_of([[10, 11, 12], [20, 21], [10, 11, 12]], [[13, 14], [22], [15]], [7, 8, 7])
    pack = pack_completions(batch, [0, 1, 2], pad_multiple=12, share_prompts=True)
    assert pack.tokens.tolist() == [10, 11, 12, 13, 14, 12, 15, 20, 21, 22, 0, 0]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 0, 1]
    assert pack.labels.tolist() == [-100, -100, 13, 14, -100, 15, -100, -100, 22, -100, -100, -100]
    assert pack.cu_seqlens.tolist() == [0, 2, 5, 7, 10, 12]
    assert pack.shared_prompts.keys.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10, 11]
    assert pack.shared_prompts.cu_keys.tolist() == [0, 2, 7, 11, 14, 16]
    assert pack.indices.tolist() == [0, 2, 1] and pack.completion.tolist() == [0, 0, 1, 2]
    assert shared_tokens(batch.prompt_lengths, batch.group_ids).tolist() == [2]


@settings(deadline=None)
@given(batch=batches(), data=st.data(), pad_multiple=st.integers(1, 3))
def test_sequences_are_those_of_a_plain_pack(batch, data, pad_multiple):
    chosen = data.draw(st.lists(st.integers(0, batch.num_completions - 1), unique=True))
    plain = pack_completions(batch, chosen)
    pack = pack_completions(batch, chosen, pad_multiple, share_prompts=True)
    spared = shared_tokens(batch.prompt_lengths[chosen], batch.group_ids[chosen]).sum()
    assert len(pack.tokens) - (len(plain.tokens) - spared) == -(len(plain.tokens) - spared) % pad_multiple
    assert sorted(pack.token_index.tolist()) == sorted(plain.token_index.tolist())
    of_completion = np.searchsorted(batch.cu_seqlens, pack.token_index, "right") - 1
    assert pack.indices[pack.completion].tolist() == of_completion.tolist()

    shared = pack.shared_prompts
    assert (shared is None) == (spared == 0)
    if shared is None:
        return
    whole = [batch.tokens[a:b].tolist() for a, b in pairwise(batch.cu_seqlens.tolist())]
    seen = []
    for number, (a, b) in enumerate(pairwise(pack.cu_seqlens.tolist())):
        keys = shared.keys[shared.cu_keys[number] : shared.cu_keys[number + 1]]
        assert keys[len(keys) - (b - a) :].tolist() == list(range(a, b))  # a sequence's own tokens come last
        assert pack.position_ids[keys].tolist() == list(range(len(keys)))
        if pack.padding[a:b].any():
            continue
        labels = pack.labels[a:b]
        assert labels[:-1][labels[:-1] != IGNORED_LABEL].tolist() == [
            following
            for label, following in zip(labels, pack.tokens[a + 1 : b], strict=False)
            if label != IGNORED_LABEL
        ]
        if (tokens := pack.tokens[keys].tolist()) in whole:
            seen.append(tokens)
    assert sorted(seen) == sorted(whole[i] for i in chosen)


def test_prompts_of_a_group_that_differ_are_refused():
    batch = batch_of([[10, 11], [10, 12]], [[13], [14]], [7, 7])
    with pytest.raises(GrpoError, match=r"--share-prompts: samples 0 and 1 .* different prompts"):
        pack_completions(batch, [0, 1], share_prompts=True)


@settings(deadline=None)
@given(batch=batches(), dp_size=st.integers(1, 2), cp_size=st.sampled_from([1, 2, 4]), more=st.integers(0, 20))
def test_micro_batches_keep_the_budget_that_shared_prompts_fill(batch, dp_size, cp_size, more):
    if batch.num_completions % dp_size:
        return
    padded = padded_lengths(batch.lengths, cp_size)
    budget = int(padded.max()) + more
    shareable = shareable_tokens(batch.prompt_lengths, cp_size)
    ranks = schedule(padded, dp_size, max_tokens=budget, together=batch.group_ids, shared=shareable)
    assert sorted(i for rank in ranks for pack in rank for i in pack) == list(range(batch.num_completions))
    for rank in ranks:
        for pack in rank:
            packed = pack_completions(batch, pack, cp_size=cp_size, share_prompts=True)
            spared = shared_tokens(batch.prompt_lengths[pack], batch.group_ids[pack], cp_size).sum()
            assert 0 < packed.cu_seqlens[-1] <= min(budget, padded[pack].sum() - spared)


@settings(deadline=None)
@given(batch=batches(), cp_size=st.sampled_from([2, 4]))
def test_context_ranks_hold_the_pack_of_one_rank(batch, cp_size):
    """The keys of each sequence are its tokens in turn, padding only at their end; all labels are there once."""
    chosen = np.arange(batch.num_completions)
    parts = [pack_completions(batch, chosen, 1, None, cp_size, rank, share_prompts=True) for rank in range(cp_size)]
    first = parts[0]
    assert sum(len(part.own_labels) for part in parts) == first.num_labels == batch.response_mask.sum()
    whole = [np.empty(first.cu_seqlens[-1], np.int64) for _ in range(3)]
    for part in parts:
        at = zigzag(first.cu_seqlens, cp_size, part.cp_rank)
        for array, own in zip(whole, (part.source, part.position_ids, part.padding), strict=True):
            array[at] = own
    source, position_ids, padding = whole
    shared = first.shared_prompts
    if shared is None:
        assert (np.diff(first.cu_seqlens) == padded_lengths(batch.lengths[first.indices], cp_size)).all()
        return
    assert shared.position_ids.tolist() == position_ids.tolist()
    sequences = []
    for a, b in pairwise(shared.cu_keys.tolist()):
        keys = shared.keys[a:b]
        assert position_ids[keys].tolist() == list(range(b - a))
        real = keys[: b - a - int(padding[keys].sum())]
        assert not padding[real].any()
        sequences.append(batch.tokens[source[real]].tolist())
    whole_sequences = [batch.tokens[a:b].tolist() for a, b in pairwise(batch.cu_seqlens.tolist())]
    assert all(sequence in sequences for sequence in whole_sequences)


def test_a_group_fills_one_micro_batch():
    """Eight completions of 10 tokens after a prompt of 101: 180 tokens, where separate ones have 888."""
    lengths, groups = np.full(16, 111), np.arange(16) // 8
    packs = schedule(lengths, 1, max_tokens=200, together=groups, shared=np.full(16, 100))
    assert sorted(packs[0]) == [list(range(8)), list(range(8, 16))]
    assert len(schedule(lengths, 1, max_tokens=200)[0]) == 16


def test_few_groups_are_divided_over_many_ranks():
    """Two groups of eight on four ranks: a half of a group each, of 100 + 4 * 11 tokens."""
    lengths, groups, prompts = np.full(16, 111), np.arange(16) // 8, np.full(16, 100)
    ranks = schedule(lengths, 4, max_tokens=200, together=groups, shared=prompts)
    assert [len(rank) for rank in ranks] == [1] * 4
    packs = sorted(rank[0] for rank in ranks)
    assert [len(pack) for pack in packs] == [4] * 4 and [set(groups[pack]) for pack in packs] == [{0}, {0}, {1}, {1}]


def test_short_prompts_do_not_unbalance_the_ranks():
    """Three groups of eight on two ranks: whole groups would be 2 to 1."""
    lengths, groups = np.full(24, 110), np.arange(24) // 8
    ranks = schedule(lengths, 2, max_tokens=2000, together=groups, shared=np.full(24, 10))
    sizes = [sum(100 * len(pack) + 10 * len(set(groups[pack])) for pack in rank) for rank in ranks]
    assert max(sizes) < 1.05 * min(sizes)
