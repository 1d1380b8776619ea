"""Packs that have one copy of what sequences begin with: the sequences of the model are the same."""

from argparse import Namespace
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithm.losses import completion_mean
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.pack import pack_completions
from megatron_grpo.data.prefix_tree import Prefixes, hashed_prefixes, spared_by_samples, spared_tokens, with_prefixes
from megatron_grpo.data.schedule import hybrid_schedule, schedule
from megatron_grpo.models import forward
from megatron_grpo.parallel.zigzag import padded_lengths, zigzag


def spared(batch: RolloutBatch, chosen, cp_size: int = 1) -> int:
    """Return the tokens that a pack with these completions spares, as the schedule knows them."""
    hashes = with_prefixes(batch).prefix_hashes[chosen]
    return int(spared_tokens(hashed_prefixes(hashes, batch.prompt_lengths[chosen]).common, cp_size).sum())


def of_groups(groups: np.ndarray, prompt: int) -> Prefixes:
    """Return the prefixes of completions whose groups, which are neighbours, have prompts of so many tokens."""
    return Prefixes(np.arange(len(groups)), np.where(np.diff(groups, prepend=-1) == 0, prompt, 0))


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
    system = list(range(900, 900 + draw(st.sampled_from([0, 0, 5, 30]))))
    prompts = {group: [100 * group + i for i in range(draw(st.integers(1, 20)))] for group in sorted(set(groups))}
    prompts = {group: system + prompt for group, prompt in prompts.items()}
    lengths = draw(st.lists(st.integers(0, 5), min_size=len(groups), max_size=len(groups)))
    completions = [[1000 + 10 * i + k for k in range(length)] for i, length in enumerate(lengths)]
    if draw(st.booleans()):  # completions that begin alike, or are equal
        completions = [[(i + k) // 3 % 2 for k in range(length)] for i, length in enumerate(lengths)]
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
    assert pack.indices.tolist() == [0, 1, 2] and pack.completion.tolist() == [0, 0, 1, 2]
    assert pack.token_index.tolist() == [3, 4, 7, 11] and pack.label_positions.tolist() == [2, 3, 5, 8]
    assert pack.own_labels.tolist() == [0, 1, 3, 2] and pack.first_labels.tolist() == [0, 1, 2, 3]
    assert spared(batch, np.arange(3)) == 2
    assert spared(batch, np.array([1, 2])) == 0


def test_completions_that_begin_alike_by_hand():
    """10 11 | 12 13 14, 10 11 | 12 13 15 and 10 11 | 12: the second node begins with what its parent predicts."""
    batch = batch_of([[10, 11]] * 3, [[12, 13, 14], [12, 13, 15], [12]], [7, 7, 8])
    pack = pack_completions(batch, [0, 1, 2], share_prompts=True)
    assert pack.tokens.tolist() == [10, 11, 12, 12, 13, 14, 13, 15]
    assert pack.cu_seqlens.tolist() == [0, 2, 3, 4, 6, 8]
    assert pack.position_ids.tolist() == [0, 1, 2, 2, 3, 4, 3, 4]
    assert pack.labels.tolist() == [-100, 12, -100, 13, 14, -100, 15, -100]
    assert pack.shared_prompts.keys.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 0, 1, 3, 4, 5, 0, 1, 3, 6, 7]
    assert pack.shared_prompts.cu_keys.tolist() == [0, 2, 5, 8, 13, 18]
    assert pack.token_index.tolist() == [2, 3, 4, 7, 8, 9, 12] and pack.completion.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert pack.first_labels.tolist() == [0, 1, 2, 0, 1, 5, 0]
    assert pack.own_labels.tolist() == [0, 1, 2, 5] and pack.label_positions.tolist() == [1, 3, 4, 6]


@settings(deadline=None)
@given(batch=batches(), data=st.data(), pad_multiple=st.integers(1, 3))
def test_sequences_are_those_of_a_plain_pack(batch, data, pad_multiple):
    chosen = data.draw(st.lists(st.integers(0, batch.num_completions - 1), unique=True))
    plain = pack_completions(batch, chosen)
    pack = pack_completions(batch, chosen, pad_multiple, share_prompts=True)
    assert len(pack.tokens) % pad_multiple == 0
    assert len(pack.tokens) - pad_multiple < (~pack.padding).sum() <= len(plain.tokens) - spared(batch, chosen)
    assert sorted(pack.token_index.tolist()) == sorted(plain.token_index.tolist())
    of_completion = np.searchsorted(batch.cu_seqlens, pack.token_index, "right") - 1
    assert pack.indices[pack.completion].tolist() == of_completion.tolist()

    shared = pack.shared_prompts
    if shared is None:
        assert len(pack.tokens) - pad_multiple < len(plain.tokens)
        return
    whole = [batch.tokens[a:b].tolist() for a, b in pairwise(batch.cu_seqlens.tolist())]
    seen = []
    for number, (a, b) in enumerate(pairwise(pack.cu_seqlens.tolist())):
        keys = shared.keys[shared.cu_keys[number] : shared.cu_keys[number + 1]]
        assert keys[len(keys) - (b - a) :].tolist() == list(range(a, b))  # a sequence's own tokens come last
        assert pack.position_ids[keys].tolist() == list(range(len(keys)))
        if pack.padding[a:b].any():
            continue
        if (tokens := pack.tokens[keys].tolist()) in whole:
            seen.append(tokens)
    assert all(seen.count(whole[i]) >= [whole[j] for j in chosen].count(whole[i]) for i in chosen)
    computed = pack.first_labels[np.arange(pack.num_labels)]
    assert sorted(set(computed.tolist())) == sorted(pack.own_labels.tolist())
    position = dict(zip(pack.own_labels.tolist(), pack.label_positions.tolist(), strict=True))
    sequence = np.searchsorted(pack.cu_seqlens, pack.label_positions, "right") - 1
    of_label = dict(zip(pack.own_labels.tolist(), sequence.tolist(), strict=True))
    for label, first in enumerate(computed.tolist()):
        token, completion = pack.token_index[label], chosen[pack.completion[label]]
        number, place = of_label[first], position[first]
        keys = shared.keys[shared.cu_keys[number] : shared.cu_keys[number + 1]].tolist()
        past = pack.tokens[keys[: keys.index(place) + 1]].tolist()  # what the position sees
        assert past == batch.tokens[batch.cu_seqlens[completion] : token].tolist()
        assert pack.labels[place] == batch.tokens[token]


@settings(deadline=None, max_examples=200)
@given(data=st.data(), cp_size=st.sampled_from([1, 2]))
def test_samples_of_an_episode_share_their_past(data, cp_size):
    """The pack has at most the tokens that the schedule expects, and each sample is a path."""
    past = list(range(data.draw(st.integers(1, 150))))
    episodes, starts = [], []
    for number in range(data.draw(st.integers(1, 3))):
        sequences = []
        for turn in range(data.draw(st.integers(1, 4))):
            before = sequences[-1] if sequences else past
            own = before[: data.draw(st.integers(0, len(before)))]
            sequences.append(own + [500 + 100 * number + 10 * turn + k for k in range(data.draw(st.integers(1, 5)))])
        episodes.append([token for sequence in sequences for token in sequence])
        starts.append((np.cumsum([len(sequence) for sequence in sequences[:-1]]) - 1).astype(np.int64).tolist())
    n = len(episodes)
    batch = RolloutBatch.from_completions(
        prompts=[episode[:1] for episode in episodes],
        completions=[episode[1:] for episode in episodes],
        log_probs=[None] * n,
        weight_version=0,
        group_ids=[0] * n,
        row_ids=[0] * n,
        sample_ids=list(range(n)),
        finish_reasons=[FinishReason.STOP] * n,
        response_masks=[
            [int(token >= 500 and k not in begins) for k, token in enumerate(episode[1:])]
            for episode, begins in zip(episodes, starts, strict=True)
        ],
        sample_starts=starts,
    )
    chosen = np.arange(n)
    pack = pack_completions(batch, chosen, cp_size=cp_size, share_prompts=True)
    of_samples = spared_by_samples(with_prefixes(batch).repeated_tokens, batch.samples, cp_size).sum()
    separate = padded_lengths(batch.lengths, cp_size, batch.samples).sum()
    assert pack.cu_seqlens[-1] <= separate - of_samples - spared(batch, chosen, cp_size)
    if pack.shared_prompts is None or cp_size > 1:
        return
    paths = np.split(pack.shared_prompts.keys, pack.shared_prompts.cu_keys[1:-1])
    paths = [pack.tokens[keys].tolist() for keys in paths]
    for episode, begins in zip(episodes, starts, strict=True):
        for a, b in pairwise([0, *(begin + 1 for begin in begins), len(episode)]):
            assert episode[a:b] in paths


@settings(deadline=None)
@given(batch=batches(), dp_size=st.integers(1, 2), cp_size=st.sampled_from([1, 2, 4]), more=st.integers(0, 20))
def test_micro_batches_keep_the_budget_that_shared_prompts_fill(batch, dp_size, cp_size, more):
    if batch.num_completions % dp_size:
        return
    padded = padded_lengths(batch.lengths, cp_size)
    budget = int(padded.max()) + more
    prefixes = hashed_prefixes(with_prefixes(batch).prefix_hashes, batch.prompt_lengths)
    ranks = schedule(padded, dp_size, max_tokens=budget, prefixes=prefixes, cp_size=cp_size)
    assert sorted(i for rank in ranks for pack in rank for i in pack) == list(range(batch.num_completions))
    for rank in ranks:
        for pack in rank:
            packed = pack_completions(batch, pack, cp_size=cp_size, share_prompts=True)
            assert 0 < packed.cu_seqlens[-1] <= min(budget, padded[pack].sum() - spared(batch, pack, cp_size))


@settings(deadline=None)
@given(batch=batches(), cp_size=st.sampled_from([2, 4]), dp_size=st.integers(1, 2), more=st.integers(0, 20))
def test_hybrid_micro_batches_keep_the_budget_of_a_rank(batch, cp_size, dp_size, more):
    """A pack of degree c, which c neighbours have, has at most c times the budget."""
    n = batch.num_completions
    if n % dp_size:
        return
    budget = -(-int(padded_lengths(batch.lengths, cp_size).max()) // cp_size) + more
    prefixes = hashed_prefixes(with_prefixes(batch).prefix_hashes, batch.prompt_lengths)
    degrees, ranks = hybrid_schedule(batch.lengths, dp_size, cp_size, budget, prefixes=prefixes)
    assert degrees == sorted(degrees, reverse=True)
    assert {len(rank) for rank in ranks} == {len(degrees)}
    for number, degree in enumerate(degrees):
        packs = [rank[number] for rank in ranks]
        for first in range(0, len(ranks), degree):
            assert packs[first : first + degree] == [packs[first]] * degree
            packed = pack_completions(batch, packs[first], cp_size=degree, share_prompts=True)
            assert 0 < packed.cu_seqlens[-1] <= degree * budget
    found = [i for place, rank in enumerate(ranks) for d, pack in zip(degrees, rank) if place % d == 0 for i in pack]
    assert sorted(found) == list(range(n))


def test_hybrid_packs_have_trees():
    """Two groups of four, a prompt of 80 tokens and completions of 10: 120 tokens, on one rank or on both."""
    lengths, groups = np.full(8, 90), np.arange(8) // 4
    prefixes = of_groups(groups, 81)
    assert hybrid_schedule(lengths, 1, 2, 130, prefixes=prefixes) == ([1], [[[0, 1, 2, 3]], [[4, 5, 6, 7]]])
    degrees, ranks = hybrid_schedule(lengths, 1, 2, 70, prefixes=prefixes)
    assert degrees == [2, 2] and sorted(ranks[0]) == [[0, 1, 2, 3], [4, 5, 6, 7]] and ranks[1] == ranks[0]


@settings(deadline=None)
@given(batch=batches(), cp_size=st.sampled_from([2, 4]))
def test_context_ranks_hold_the_pack_of_one_rank(batch, cp_size):
    """The keys of each sequence are its tokens in turn, padding only at their end; all labels are there once."""
    chosen = np.arange(batch.num_completions)
    parts = [pack_completions(batch, chosen, 1, None, cp_size, rank, share_prompts=True) for rank in range(cp_size)]
    first = parts[0]
    own = [label for part in parts for label in part.own_labels.tolist()]
    labels = np.arange(first.num_labels) if first.first_labels is None else first.first_labels
    assert sorted(own) == sorted(set(labels.tolist())) and first.num_labels == batch.response_mask.sum()
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


def test_prompts_with_images_of_their_own_are_apart():
    """Four episodes of a row have equal tokens; the reset of the first two has shown an image, each its own."""
    prompt, image = [*range(10, 30)], 9
    batch = batch_of([[*prompt, image, image, 5]] * 4, [[6]] * 4, [0] * 4)
    batch = replace(
        batch,
        visual_index=np.tile([*[-1] * 20, 0, 1, -1, -1], 4).astype(np.int32),
        image_sizes=np.array([3, 3, 0, 0]),
        image_bytes=np.arange(6, dtype=np.uint8),
    )
    pack = pack_completions(batch, [0, 1, 2, 3], share_prompts=True)
    sources = pack.source[pack.images.places] // 24
    assert pack.images.keys == [-2, -1, 0] and sorted(sources) == [0, 0, 1, 1, 2, 2]
    assert len(pack.tokens) == 19 + 2 * 5 + 4 + 2 * 1  # common text; the first two; the rest of the others' prompt
    known = forward._prefixes(Namespace(vision_config={"depth": 1}, mtp_num_layers=None), batch, np.arange(4))
    assert known.common.tolist() == [0, 0, 0, 23]  # the prompt of the last two


def test_samples_of_an_episode_share_its_pictures():
    """The second sample repeats the prompt with its picture, and the picture that an environment has shown, after other
    words: what comes before these is computed once. In another episode the second picture is another one.
    """
    picture, shown = [9, 9, 9], [8, 8]
    first = [10, *picture, 11, 12, *shown, 13]
    second = [10, *picture, 11, 12, *shown, 14, 15]
    batch = batch_of([first[:5]] * 2, [first[5:] + second] * 2, [0, 0])
    starts = np.zeros(2 * 19, np.uint8)
    starts[[9, 28]] = 1
    index = [-1, 0, 1, 2, -1, -1, 3, 4, -1]
    batch = replace(
        batch,
        sample_starts=starts,
        samples=np.array([2, 2], np.int32),
        response_mask=np.zeros_like(batch.response_mask),
        visual_index=np.tile([*index, *index, -1], 2).astype(np.int32),
        image_sizes=np.array([2, 2]),
        image_bytes=np.arange(4, dtype=np.uint8),
    )
    pack = pack_completions(batch, [0, 1], share_prompts=True)
    assert len(pack.tokens) == 2 * (7 + 2 + 3) and (pack.source >= 0).all()
    assert pack.images.keys == [-2, -1]
    assert sorted(pack.images.sources.tolist()) == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 9]


def test_a_group_fills_one_micro_batch():
    """Eight completions of 10 tokens after a prompt of 101: 180 tokens, where separate ones have 888."""
    lengths, groups = np.full(16, 111), np.arange(16) // 8
    packs = schedule(lengths, 1, max_tokens=200, prefixes=of_groups(groups, 101))
    assert sorted(packs[0]) == [list(range(8)), list(range(8, 16))]
    assert len(schedule(lengths, 1, max_tokens=200)[0]) == 16


def test_few_groups_are_divided_over_many_ranks():
    """Two groups of eight on four ranks: a half of a group each, of 100 + 4 * 11 tokens."""
    lengths, groups = np.full(16, 111), np.arange(16) // 8
    ranks = schedule(lengths, 4, max_tokens=200, prefixes=of_groups(groups, 101))
    assert [len(rank) for rank in ranks] == [1] * 4
    packs = sorted(rank[0] for rank in ranks)
    assert [len(pack) for pack in packs] == [4] * 4 and [set(groups[pack]) for pack in packs] == [{0}, {0}, {1}, {1}]


def test_short_prompts_do_not_unbalance_the_ranks():
    """Three groups of eight on two ranks: whole groups would be 2 to 1."""
    lengths, groups = np.full(24, 110), np.arange(24) // 8
    ranks = schedule(lengths, 2, max_tokens=2000, prefixes=of_groups(groups, 11))
    sizes = [sum(100 * len(pack) + 10 * len(set(groups[pack])) for pack in rank) for rank in ranks]
    assert max(sizes) < 1.05 * min(sizes)


def test_groups_with_one_system_prompt():
    """Four groups of four, 100 tokens of a system prompt, 100 of a group's and 10 of each completion."""
    lengths, groups = np.full(16, 210), np.arange(16) // 4
    common = np.where(np.diff(groups, prepend=0) == 0, 201, 101)
    common[0] = 0
    prefixes = Prefixes(np.arange(16), common)
    of_group, of_two = 197 + 4 * 13, 99 + 2 * (98 + 4 * 13)  # 197 and 99 of the common tokens are sure
    packs = schedule(lengths, 1, max_tokens=of_group, prefixes=prefixes)[0]
    assert sorted(packs) == np.arange(16).reshape(4, 4).tolist()
    packs = schedule(lengths, 1, max_tokens=of_two, prefixes=prefixes)[0]
    assert sorted(packs) == np.arange(16).reshape(2, 8).tolist()


def test_completions_without_a_token_in_the_loss_need_no_slot():
    """The third of three completions has the only label: sums over completions have as many slots as labels."""
    batch = batch_of([[1], [2], [3]], [[4], [5], [6]], [0, 1, 2])
    batch.response_mask[[1, 3]] = 0
    for share in (False, True):
        pack = pack_completions(batch, [0, 1, 2], share_prompts=share)
        assert pack.indices[pack.completion].tolist() == [2]
        completion = torch.from_numpy(pack.device_arrays()["completion"])
        assert completion_mean(torch.tensor([2.5]), completion).tolist() == [2.5]


def test_prompts_are_shared_up_to_the_first_token_with_other_experts():
    """Each sequence has its own copy of the last token in common. The schedule knows 16 tokens."""
    plain = batch_of([list(range(40))] * 2, [[50], [51]], [0, 0])
    begin, pair = plain.cu_seqlens[1], np.arange(2)
    experts = np.zeros((len(plain.tokens), 3, 1), np.int16)
    for token, known, shared in ((None, 39, 39), (39, 39, 39), (20, 15, 20)):
        routed_experts = experts.copy()
        if token is not None:
            routed_experts[begin + token, 1] = 5
        batch = replace(plain, routed_experts=routed_experts)
        assert spared(batch, pair) == known
        assert len(plain.tokens) - len(pack_completions(batch, pair, share_prompts=True).tokens) == shared
