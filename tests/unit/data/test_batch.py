"""RolloutBatch: a pack laid out by hand, round trips, and that no packing changes what is learnt."""

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithm.weighting import token_weights
from megatron_grpo.data.batch import FIELDS, FinishReason, RolloutBatch
from megatron_grpo.data.pack import pack_completions
from megatron_grpo.data.schedule import schedule
from megatron_grpo.parallel.zigzag import padded_lengths
from megatron_grpo.utils.errors import GrpoError

NAN = np.float32("nan")


def hand_batch():
    """Three completions: prompt 10 11 -> 12 13; prompt 20 -> nothing; prompt 30 31 32 -> 33, the engine not asked."""
    return RolloutBatch.from_completions(
        prompts=[[10, 11], [20], [30, 31, 32]],
        completions=[[12, 13], [], [33]],
        log_probs=[[-0.5, -0.25], [], None],
        weight_version=4,
        group_ids=[7, 7, 9],
        row_ids=[100, 100, 101],
        sample_ids=[0, 1, 2],
        finish_reasons=[FinishReason.STOP, FinishReason.ABORT, FinishReason.LENGTH],
    )


def filled(batch):
    """The same batch with every optional array, values telling their place."""
    total, n = len(batch.tokens), batch.num_completions
    batch.rewards = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    batch.old_log_probs = -np.arange(total, dtype=np.float32)
    batch.ref_log_probs = -np.arange(total, dtype=np.float32) - 1000
    batch.newest = np.arange(total, dtype=np.float32) + 0.25
    batch.teacher_log_probs = -np.arange(total, dtype=np.float32) - 2000
    batch.routed_experts = np.arange(6 * total, dtype=np.int16).reshape(total, 3, 2)
    kept = np.stack([np.arange(total) + 5000, batch.tokens, np.full(total, -1)], axis=1)
    batch.kept_token_ids = np.where(batch.response_mask[:, None] == 1, kept, -1).astype(np.int32)
    batch.advantages = np.arange(n, dtype=np.float32) - 1
    batch.weights = np.arange(n, dtype=np.float32) + 0.5
    return batch


def assert_same(a, b):
    for name, spec in FIELDS.items():
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert left.dtype == right.dtype == spec.dtype
            np.testing.assert_array_equal(left, right, err_msg=name)


@st.composite
def batches(draw, min_size=0, max_size=8):
    """Batches of any shape, tokens all different, several turns (holes in the loss mask) included."""
    n = draw(st.integers(min_size, max_size))
    prompt_lengths = draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    completion_lengths = draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))
    first = np.cumsum([0, *prompt_lengths, *completion_lengths])
    runs = [list(range(a, b)) for a, b in pairwise(first)]
    batch = RolloutBatch.from_completions(
        prompts=runs[:n],
        completions=runs[n:],
        log_probs=[[-0.001 * token for token in run] for run in runs[n:]],
        weight_version=1,
        group_ids=draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)),
        row_ids=list(range(n)),
        sample_ids=draw(st.permutations(range(n))),
        finish_reasons=[FinishReason.STOP] * n,
    )
    holes = draw(st.lists(st.booleans(), min_size=len(batch.tokens), max_size=len(batch.tokens)))
    batch.response_mask[np.array(holes, dtype=bool)] = 0
    batch.validate()
    return filled(batch) if draw(st.booleans()) else batch


# ---- one micro-batch


def test_flat_arrays_by_hand():
    batch = hand_batch()
    assert batch.num_completions == 3
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 9]
    assert batch.tokens.tolist() == [10, 11, 12, 13, 20, 30, 31, 32, 33]
    assert batch.response_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1]
    np.testing.assert_array_equal(batch.rollout_log_probs, np.float32([NAN, NAN, -0.5, -0.25, *[NAN] * 5]))
    assert batch.lengths.tolist() == [4, 1, 4]
    assert batch.completion_lengths.tolist() == batch.response_lengths.tolist() == [2, 0, 1]
    assert set(batch.weight_version.tolist()) == {4}
    assert batch.rewards.shape == (3, 0)


def test_pack_by_hand():
    pack = pack_completions(filled(hand_batch()), [2, 1, 0], pad_multiple=4)
    #                                 |--- 2 ---|  1  |--- 0 ---|  padding
    assert pack.tokens.tolist() == [30, 31, 32, 33, 20, 10, 11, 12, 13, 0, 0, 0]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 1, 2]
    assert pack.labels.tolist() == [-100, -100, 33, -100, -100, -100, 12, 13, -100, -100, -100, -100]
    assert pack.label_positions.tolist() == pack.device_arrays()["label_positions"].tolist() == [2, 6, 7]
    assert pack.completion.tolist() == [0, 2, 2]
    assert pack.device_arrays()["completion"].tolist() == [0, 1, 1]  # of those with labels: fewer than labels
    assert pack.padding.tolist() == [False] * 9 + [True] * 3
    assert pack.cu_seqlens.tolist() == [0, 4, 5, 9, 12]
    assert pack.cu_seqlens.dtype == np.int32
    assert pack.tokens.dtype == pack.labels.dtype == pack.position_ids.dtype == np.int64
    assert pack.max_seqlen == 4
    # the label tokens 33, 12, 13 lie at 8, 2, 3 of the batch
    assert pack.num_labels == 3
    assert pack.token_index.tolist() == [8, 2, 3]
    np.testing.assert_array_equal(pack.of_labels["rollout_log_probs"], np.float32([NAN, -0.5, -0.25]))
    assert pack.of_labels["old_log_probs"].tolist() == [-8, -2, -3]
    assert pack.of_labels["ref_log_probs"].tolist() == [-1008, -1002, -1003]
    assert pack.of_labels["advantages"].tolist() == [1, -1, -1]
    assert pack.of_labels["weights"].tolist() == [2.5, 0.5, 0.5]
    # experts stand at their own token, not at the place where it is predicted; kept tokens at the label
    assert pack.of_labels["kept_token_ids"].tolist() == [[5008, 33, -1], [5002, 12, -1], [5003, 13, -1]]
    assert pack.source.tolist() == [5, 6, 7, 8, 4, 0, 1, 2, 3, -1, -1, -1]
    assert pack.of_tokens["routed_experts"].shape == (12, 3, 2) and pack.of_tokens["routed_experts"].dtype == np.int16
    assert pack.of_tokens["routed_experts"][:, 0, 0].tolist() == [30, 36, 42, 48, 24, 0, 6, 12, 18, -1, -1, -1]
    assert pack.of_tokens["routed_experts"][1].tolist() == [[36, 37], [38, 39], [40, 41]]


def test_advantages_of_tokens_take_the_place_of_those_of_completions():
    batch = filled(hand_batch())
    batch.token_advantages = np.arange(9, dtype=np.float32) / 2
    assert pack_completions(batch, [2, 1, 0]).of_labels["advantages"].tolist() == [
        4,
        1,
        1.5,
    ]  # of the tokens 33, 12 and 13
    assert pack_completions(batch, [0], cp_size=2, cp_rank=1).of_labels["advantages"].tolist() == [1, 1.5]


def three_completions(**more) -> RolloutBatch:
    """Completions of two, no and one token, with further arguments of `RolloutBatch.from_completions`."""
    return RolloutBatch.from_completions(
        prompts=[[10, 11], [20], [30, 31, 32]],
        completions=[[12, 13], [], [33]],
        log_probs=[None] * 3,
        weight_version=0,
        group_ids=[0] * 3,
        row_ids=[0] * 3,
        sample_ids=[0, 1, 2],
        finish_reasons=[FinishReason.STOP] * 3,
        **more,
    )


def test_kept_tokens_stand_at_their_token():
    kept = [np.array([[12, 5], [-1, -1]], np.int32), np.zeros((0, 2), np.int32), np.array([[4, 33]], np.int32)]
    batch = three_completions(kept_token_ids=kept)
    none = [-1, -1]
    assert batch.kept_token_ids.tolist() == [none, none, [12, 5], none, none, none, none, none, [4, 33]]
    # whichever context rank holds the label, all of them have the values of the whole pack
    for cp_rank in (0, 1):
        pack = pack_completions(batch, [2, 0], cp_size=2, cp_rank=cp_rank)
        assert pack.of_labels["kept_token_ids"].tolist() == [[4, 33], [12, 5], none]


def test_experts_of_an_engine_that_has_not_routed_the_last_token():
    experts = [np.full((tokens, 2, 1), number, np.int16) for number, tokens in enumerate([3, 0, 3])]
    batch = three_completions(routed_experts=experts)
    assert batch.routed_experts[:, 0, 0].tolist() == [0, 0, 0, -1, -1, 2, 2, 2, -1]
    assert batch.routed_experts.shape == (9, 2, 1)


def test_pack_without_padding_and_before_anything_is_computed():
    pack = pack_completions(hand_batch(), [0, 1], pad_multiple=5)
    assert pack.cu_seqlens.tolist() == [0, 4, 5]
    assert pack.of_labels.keys() == {"rollout_log_probs"} and not pack.of_tokens


def test_pack_of_two_context_ranks_by_hand():
    """Each sequence fills 4 chunks: 30 31 32 33 | 20 0 0 0 | 10 11 12 13 | 0 0 0 0. Rank 0 holds the first and the last
    of each, rank 1 the others, and all labels.
    """
    batch = filled(hand_batch())
    first, second = (pack_completions(batch, [2, 1, 0], pad_multiple=2, cp_size=2, cp_rank=rank) for rank in (0, 1))
    assert first.tokens.tolist() == [30, 33, 20, 0, 10, 13, 0, 0]
    assert second.tokens.tolist() == [31, 32, 0, 0, 11, 12, 0, 0]
    assert first.position_ids.tolist() == [0, 3] * 4
    assert second.position_ids.tolist() == [1, 2] * 4
    assert first.padding.tolist() == [False, False, False, True, False, False, True, True]
    assert second.padding.tolist() == [False, False, True, True, False, False, True, True]
    assert first.source.tolist() == [5, 8, 4, -1, 0, 3, -1, -1]
    assert first.of_tokens["routed_experts"][:, 2, 1].tolist() == [35, 53, 29, -1, 5, 23, -1, -1]
    assert second.of_tokens["routed_experts"][:, 2, 1].tolist() == [41, 47, -1, -1, 11, 17, -1, -1]
    for pack in (first, second):
        assert pack.cu_seqlens.tolist() == [0, 4, 8, 12, 16]
        assert pack.max_seqlen == 4

    assert first.labels.tolist() == [-100] * 8
    assert first.own_labels.tolist() == []
    assert second.labels.tolist() == [-100, 33, -100, -100, 12, 13, -100, -100]
    assert second.own_labels.tolist() == [0, 1, 2]
    assert first.label_positions.tolist() == [] and second.label_positions.tolist() == [1, 4, 5]
    for pack in (first, second):  # what belongs to labels is the whole pack's
        assert pack.token_index.tolist() == [8, 2, 3]
        assert pack.completion.tolist() == [0, 2, 2]
        np.testing.assert_array_equal(pack.of_labels["rollout_log_probs"], np.float32([NAN, -0.5, -0.25]))
        assert pack.of_labels["old_log_probs"].tolist() == [-8, -2, -3]
        assert pack.of_labels["ref_log_probs"].tolist() == [-1008, -1002, -1003]
        assert pack.of_labels["advantages"].tolist() == [1, -1, -1]
        assert pack.of_labels["weights"].tolist() == [2.5, 0.5, 0.5]


@pytest.mark.parametrize(("cp_size", "total"), [(1, 9), (1, 11), (2, 12), (2, 20)])
def test_pack_of_a_given_length(cp_size, total):
    packs = [
        pack_completions(hand_batch(), [0, 1, 2], total_length=total, cp_size=cp_size, cp_rank=r)
        for r in range(cp_size)
    ]
    assert {len(pack.tokens) for pack in packs} == {total // cp_size}
    assert {pack.cu_seqlens[-1] for pack in packs} == {total}
    assert sum(pack.padding.sum() for pack in packs) == total - 9


@pytest.mark.parametrize("options", [{"total_length": 8}, {"total_length": 10, "pad_multiple": 4}])
def test_pack_refuses_a_length_that_it_cannot_have(options):
    with pytest.raises(ValueError, match="a pack of 9 tokens cannot be padded"):
        pack_completions(hand_batch(), [0, 1, 2], **options)


def test_padded_lengths_by_hand():
    assert padded_lengths(np.array([1, 4, 5, 9]), 1).tolist() == [1, 4, 5, 9]
    assert padded_lengths(np.array([1, 4, 5, 9]), 2).tolist() == [4, 4, 8, 12]
    # Samples of 1, 1 and 7 tokens are padded to 4, 4 and 8; of 5 and 4 tokens to 8 and 4: both within the bound.
    assert padded_lengths(np.array([9, 9]), 2, np.array([3, 2])).tolist() == [16, 12]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([1, 2, 4, 8]))
def test_samples_are_padded_to_no_more_than_their_completion(lengths, cp_size):
    bound = padded_lengths(np.array([sum(lengths)]), cp_size, np.array([len(lengths)]))[0]
    assert padded_lengths(np.array(lengths), cp_size).sum() <= bound


@settings(deadline=None)
@given(
    batch=batches(min_size=1),
    cp_size=st.integers(1, 4),
    pad_multiple=st.integers(1, 3),
    more=st.none() | st.integers(0, 3),
    data=st.data(),
)
def test_context_ranks_share_a_pack(batch, cp_size, pad_multiple, more, data):
    """Written token by token: the whole pack, cut into chunks; its labels are each in one rank's part, once."""
    order = data.draw(st.permutations(range(batch.num_completions)))
    chosen = order[: data.draw(st.integers(1, len(order)))]
    unit = 2 * cp_size if cp_size > 1 else 1
    whole = []  # sequences of (token, its place in the flat arrays, the place of its label), None where there is none
    for i in chosen:
        a, b = batch.cu_seqlens[i : i + 2].tolist()
        rows = [
            (int(batch.tokens[k]), k, k + 1 if k + 1 < b and batch.response_mask[k + 1] else None) for k in range(a, b)
        ]
        whole.append(rows + [(0, None, None)] * (-len(rows) % unit))
    used = sum(map(len, whole))
    total = used + -used % (unit * pad_multiple) + (more or 0) * unit * pad_multiple
    if total > used:
        whole.append([(0, None, None)] * (total - used))

    options = {} if more is None else {"total_length": total}
    owner = np.repeat(np.arange(batch.num_completions), batch.lengths)
    seen = []
    for rank in range(cp_size):
        pack = pack_completions(batch, chosen, pad_multiple, cp_size=cp_size, cp_rank=rank, **options)
        expected = []  # rows with their position
        for rows in whole:
            rows = list(enumerate(rows))
            chunk = len(rows) // (2 * cp_size)
            early, late = rank * chunk, (2 * cp_size - 1 - rank) * chunk
            expected += rows if cp_size == 1 else rows[early : early + chunk] + rows[late : late + chunk]
        assert len(pack.tokens) == total // cp_size
        assert pack.cu_seqlens.tolist() == np.cumsum([0, *map(len, whole)]).tolist()
        assert pack.max_seqlen == max(map(len, whole))
        assert pack.position_ids.tolist() == [position for position, _ in expected]
        assert pack.tokens.tolist() == [token for _, (token, _, _) in expected]
        assert pack.padding.tolist() == [place is None for _, (_, place, _) in expected]
        labels = [label for _, (_, _, label) in expected]
        assert pack.labels.tolist() == [-100 if label is None else batch.tokens[label] for label in labels]
        own = pack.token_index[pack.own_labels]
        assert own.tolist() == [label for label in labels if label is not None]
        assert [chosen[i] for i in pack.completion] == owner[pack.token_index].tolist()
        for name in (
            "old_log_probs",
            "ref_log_probs",
            "rollout_log_probs",
            "newest",
            "advantages",
            "weights",
        ):
            source, values = getattr(batch, name), pack.of_labels.get(name)
            assert (values is None) == (source is None)
            if values is not None:
                at = owner[pack.token_index] if name in ("advantages", "weights") else pack.token_index
                np.testing.assert_array_equal(values, source[at])
        seen += own.tolist()
    in_loss = [k for i in chosen for k in range(batch.cu_seqlens[i], batch.cu_seqlens[i + 1]) if batch.response_mask[k]]
    assert sorted(seen) == sorted(in_loss)


def test_pack_of_an_empty_completion_has_no_label():
    pack = pack_completions(filled(hand_batch()), [1])
    assert pack.num_labels == 0
    assert pack.labels.tolist() == [-100]
    assert (
        pack.of_labels["advantages"].shape
        == pack.of_labels["weights"].shape
        == pack.of_labels["old_log_probs"].shape
        == (0,)
    )


@settings(deadline=None)
@given(
    batch=batches(min_size=1),
    dp_size=st.integers(1, 2),
    cp_size=st.integers(1, 2),
    pad_multiple=st.integers(1, 8),
    data=st.data(),
)
def test_no_packing_changes_what_is_learnt(batch, dp_size, cp_size, pad_multiple, data):
    """Each token in the loss comes in one pack of one context rank, once, with its own values; no pack is over the
    budget but for its padding sequence.
    """
    batch = filled(batch.select(np.arange(batch.num_completions // dp_size * dp_size)))
    if not batch.num_completions:
        return
    batch.weights = token_weights("grpo", batch.response_lengths, 1, 10).astype(np.float32)
    lengths = padded_lengths(batch.lengths, cp_size)
    budget = int(lengths.max()) + data.draw(st.integers(0, 20))
    multiple = pad_multiple * (2 * cp_size if cp_size > 1 else 1)
    owner = np.repeat(np.arange(batch.num_completions), batch.lengths)
    seen, total = [], 0.0
    for indices in chain(*schedule(lengths, dp_size, max_tokens=budget)):
        for cp_rank in range(cp_size):
            pack = pack_completions(batch, indices, pad_multiple, cp_size=cp_size, cp_rank=cp_rank)
            assert len(pack.tokens) % pad_multiple == 0
            assert pack.cu_seqlens[-1] == len(pack.tokens) * cp_size < pack.cu_seqlens[len(indices)] + multiple
            assert pack.cu_seqlens[len(indices)] <= budget
            assert pack.max_seqlen == np.diff(pack.cu_seqlens).max()
            at = np.flatnonzero(pack.labels != -100)
            own = pack.token_index[pack.own_labels]
            np.testing.assert_array_equal(pack.labels[at], batch.tokens[own])
            np.testing.assert_array_equal(pack.tokens[at], batch.tokens[own - 1])
            np.testing.assert_array_equal(pack.of_labels["advantages"], batch.advantages[owner[pack.token_index]])
            np.testing.assert_array_equal(pack.of_labels["old_log_probs"], batch.old_log_probs[pack.token_index])
            np.testing.assert_array_equal(
                pack.of_labels["rollout_log_probs"], batch.rollout_log_probs[pack.token_index]
            )
            np.testing.assert_array_equal(pack.of_labels["kept_token_ids"], batch.kept_token_ids[pack.token_index])
            seen += own.tolist()
            total += float(
                (pack.of_labels["weights"] * pack.of_labels["old_log_probs"])[pack.own_labels].sum(dtype=np.float64)
            )
    assert sorted(seen) == np.flatnonzero(batch.response_mask).tolist()
    expected = [
        batch.old_log_probs[a:b][batch.response_mask[a:b] == 1].mean() if batch.response_mask[a:b].any() else 0.0
        for a, b in pairwise(batch.cu_seqlens)
    ]
    assert total == pytest.approx(float(np.mean(expected)), rel=1e-6, abs=1e-6)


# ---- choosing, joining, travelling, storing


@settings(deadline=None)
@given(batches(), st.data())
def test_split_shuffle_and_join_is_the_identity(batch, data):
    in_order = batch.sorted_by_sample()
    assert in_order.sample_ids.tolist() == sorted(batch.sample_ids.tolist())
    order = data.draw(st.permutations(range(batch.num_completions)))
    cut = data.draw(st.integers(0, batch.num_completions))
    parts = [batch.select(order[:cut]), batch.select(order[cut:])]
    joined = RolloutBatch.concatenate(parts)
    joined.validate()
    assert_same(joined.sorted_by_sample(), in_order)


def test_batches_with_different_arrays_do_not_join():
    with pytest.raises(ValueError, match="different arrays"):
        RolloutBatch.concatenate([hand_batch(), filled(hand_batch())])


@pytest.mark.parametrize("batch", [hand_batch(), filled(hand_batch())])
def test_save_and_load(tmp_path, batch):
    batch.save(tmp_path / "rollout")  # no suffix is added
    assert_same(RolloutBatch.load(tmp_path / "rollout"), batch)


def test_load_refuses_what_is_not_a_rollout(tmp_path):
    path = tmp_path / "rollout.npz"
    with pytest.raises(GrpoError, match=r"cannot read the rollout .*rollout\.npz"):
        RolloutBatch.load(path)
    hand_batch().save(path)
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:-30],
        whole[: len(whole) // 2],
        b"text, not an archive",
        whole.replace(b"\x0a\0\0\0", b"\x0b\0\0\0"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(GrpoError, match="cannot read the rollout"):
            RolloutBatch.load(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(GrpoError, match="one array"):
        RolloutBatch.load(tmp_path / "one.npy")
    np.savez(path, tokens=np.zeros(3, np.int32), extra=np.zeros(1))
    with pytest.raises(GrpoError, match=r"missing or unknown arrays \['cu_seqlens', 'extra'"):
        RolloutBatch.load(path)
    np.savez(path, tokens=np.array([{"a": "pickle"}], dtype=object))
    with pytest.raises(GrpoError, match="cannot read the rollout"):
        RolloutBatch.load(path)


# ---- validation


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", np.zeros(9, np.int64), "tokens is int64, expected int32"),
        ("cu_seqlens", np.array([0, 4, 5, 8]), "cu_seqlens must rise from 0 to the 9 tokens"),
        ("cu_seqlens", np.array([0, 5, 4, 9]), "cu_seqlens must rise"),
        ("cu_seqlens", np.array([], np.int64), "cu_seqlens must rise"),
        ("response_mask", np.zeros(8, np.uint8), r"response_mask has shape \(8,\), expected \(9,\)"),
        ("group_ids", np.zeros(2, np.int64), r"group_ids has shape \(2,\), expected \(3,\)"),
        ("rewards", np.zeros(3, np.float32), r"rewards has shape \(3,\), expected \(3, 0\)"),
        ("rewards", np.zeros((2, 4), np.float32), r"rewards has shape \(2, 4\), expected \(3, 4\)"),
        ("rewards", np.float32([[1], [np.inf], [NAN]]), "rewards are not infinite, but not at index 1 of 3"),
        ("prompt_lengths", np.array([2, 0, 3], np.int32), "a prompt has at least one token, but not at index 1"),
        ("prompt_lengths", np.array([2, 2, 3], np.int32), "a prompt is no longer than its sequence"),
        ("prompt_lengths", np.array([3, 1, 3], np.int32), "response_mask is 0 on prompts, but not at index 2"),
        ("tokens", np.full(9, -1, np.int32), "token ids are not negative"),
        ("response_mask", np.full(9, 2, np.uint8), "response_mask is 0 or 1"),
        ("rollout_log_probs", np.full(9, 0.5, np.float32), "log-probabilities are not above 0"),
        ("sample_ids", np.array([1, 0, 1]), "sample_ids are unique"),
        ("finish_reasons", np.array([0, 1, 4], np.uint8), "finish_reasons are known, but not at index 2"),
        ("turns", np.array([1, 0, 1], np.int32), "turns is at least 1"),
        ("advantages", np.float32([0, NAN, 0]), "advantages are finite, but not at index 1"),
        ("weights", np.float32([np.inf, 0, 0]), "weights are finite, but not at index 0"),
        ("old_log_probs", np.zeros(3, np.float32), r"old_log_probs has shape \(3,\), expected \(9,\)"),
        (
            "routed_experts",
            np.zeros((8, 3, 2), np.int16),
            r"routed_experts has shape \(8, 3, 2\), expected \(9, 3, 2\)",
        ),
        (
            "kept_token_ids",
            np.array([[-1], [-1], [12], [-1], [-1], [-1], [-1], [-1], [32]], np.int32),
            "a sampled token is among its kept tokens, but not at index 8",
        ),
        (
            "kept_token_ids",
            np.array([[-1, -1]] * 3 + [[12, -1]] + [[-1, -1]] * 5, np.int32),
            "a sampled token is among its kept tokens, but not at index 3",
        ),
        ("kept_token_ids", np.zeros(9, np.int32), r"kept_token_ids has shape \(9,\), expected \(9, 0\)"),
        ("routed_experts", np.zeros((9, 3), np.int16), r"routed_experts has shape \(9, 3\), expected \(9, 3, 0\)"),
    ],
)
def test_validate_names_what_is_wrong(name, value, message):
    batch = hand_batch()
    batch.validate()
    setattr(batch, name, value)
    with pytest.raises(GrpoError, match=message):
        batch.validate()


def test_every_optional_array_is_absent_at_first():
    assert all((getattr(hand_batch(), name) is None) == spec.optional for name, spec in FIELDS.items())
