"""The rounds of an exchange: every token arrives once where it must, and every sender works in every round."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.parallel import exchange
from megatron_grpo.parallel.exchange import Hop, hops

BUDGET = 64  # bytes of a round
TYPES = (np.int32, np.uint8)  # two arrays: a token has 5 bytes
TOKEN = 5


class MadeUpGroup:
    """Ranks that are threads of this process; it notes the bytes that each of them sends and receives in a round."""

    def __init__(self, ranks: int):
        self.barrier = threading.Barrier(ranks, timeout=30)
        self.parts: list[list[np.ndarray]] = [[] for _ in range(ranks)]
        self.sent: list[list[int]] = [[] for _ in range(ranks)]
        self.received: list[list[int]] = [[] for _ in range(ranks)]

    def of(self, rank: int) -> SimpleNamespace:
        def alltoall_base(data, given, taken, sent):
            self.sent[rank].append(sum(sent))
            self.received[rank].append(sum(taken))
            self.parts[rank] = np.split(given.numpy(), np.cumsum(sent)[:-1])
            self.barrier.wait()
            parts = [of_other[rank] for of_other in self.parts]
            assert [len(part) for part in parts] == taken
            data.numpy()[:] = np.concatenate(parts)
            self.barrier.wait()
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(rank=lambda: rank, alltoall_base=alltoall_base)


@st.composite
def exchanges(draw):
    ranks, n = draw(st.integers(1, 6)), draw(st.integers(0, 20))
    lengths = draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))
    source = draw(st.lists(st.integers(0, ranks - 1), min_size=n, max_size=n))
    receivers = draw(st.lists(st.sets(st.integers(0, ranks - 1)), min_size=n, max_size=n))
    needed = np.array([[rank in of for of in receivers] for rank in range(ranks)], bool).reshape(ranks, n)
    return np.array(source, np.int64), needed, np.array(lengths, np.int64)


def laid_out(chosen: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Return the arrays of the chosen completions; no two tokens of an exchange are equal."""
    numbers = [1000 * i + place for i in np.flatnonzero(chosen) for place in range(lengths[i])]
    return [np.array(numbers, np.int32), np.array([number % 251 for number in numbers], np.uint8)]


@given(exchanges())
def test_every_token_arrives_once_and_no_rank_exceeds_its_budget(drawn):
    source, needed, lengths = drawn
    ranks, sizes = len(needed), lengths * TOKEN
    group = MadeUpGroup(ranks)
    results: list = [None] * ranks

    def run(rank: int) -> None:
        offers = source == rank
        arrays, starts = laid_out(offers, lengths), np.cumsum(np.where(offers, lengths, 0)) - lengths
        begins = np.cumsum(np.where(needed[rank], lengths, 0)) - lengths
        got = [np.full(lengths[needed[rank]].sum(), 77, kind) for kind in TYPES]
        for hop in hops(source, needed, sizes):
            exchange._send(arrays, starts, got, begins, lengths, hop, hop.rounds(sizes), group.of(rank))
            arrays, starts = got, begins
        results[rank] = got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "ROUND", BUDGET)
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rounds = [hop.rounds(sizes) for hop in hops(source, needed, sizes)]
    for rank, got in enumerate(results):
        for found, expected in zip(got, laid_out(needed[rank], lengths), strict=True):
            np.testing.assert_array_equal(found, expected)
    for sent in group.sent + group.received:
        assert len(sent) == sum(rounds)
        assert max(sent, default=0) <= BUDGET + ranks * TOKEN  # and one token of each other rank
    copies = needed.sum(0) * sizes
    assert sum(map(sum, group.sent)) <= copies.sum() + sizes[needed.any(0)].sum()  # sources keep what they need


@given(exchanges())
def test_the_two_hops_reach_who_needs_a_completion_and_nobody_else(drawn):
    source, needed, lengths = drawn
    first, second = hops(source, needed, lengths * TOKEN)
    np.testing.assert_array_equal(first.to | second.to, needed)
    assert not (first.to & second.to).any()
    of = np.arange(needed.shape[1])
    assert (first.to.sum(0) - needed[source, of] <= 1).all()  # one copy, beside that which its source keeps
    relayed = second.to.any(0)
    assert first.to[second.source, of][relayed].all()  # a relay has the tokens


@given(exchanges())
def test_the_fullest_rank_alone_decides_how_many_rounds_a_hop_takes(drawn):
    source, needed, lengths = drawn
    sizes = lengths * TOKEN
    for hop in hops(source, needed, sizes):
        fullest = 0
        for rank in range(len(needed)):
            sends = sum(int(sizes[i]) for i in of_rank(hop, rank) for _ in np.flatnonzero(hop.to[:, i]))
            takes = sum(int(sizes[i]) for i in np.flatnonzero(hop.to[rank]))
            fullest = max(fullest, sends, takes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "ROUND", BUDGET)
            assert hop.rounds(sizes) == -(-fullest // BUDGET)


def of_rank(hop: Hop, rank: int) -> list[int]:
    return [i for i in range(len(hop.source)) if hop.source[i] == rank]


def test_senders_in_prompt_order_work_at_the_same_time():
    """32 engines made 64 completions each, consecutive ones, of 3 MiB: 192 MiB each are 12 rounds of 16 MiB."""
    source = np.repeat(np.arange(32), 64)
    needed = np.arange(32)[:, None] == (np.arange(2048) * 7) % 32
    (first, second), sizes = hops(source, needed, np.full(2048, 3 * 2**20)), np.full(2048, 3 * 2**20)
    assert first.rounds(sizes) == 12 and second.rounds(sizes) == 0


def test_a_replica_of_many_ranks_receives_one_copy_and_all_its_ranks_pass_it_on():
    """64 ranks need the same 128 completions of 1 MiB of one rank: it sends 128 MiB, and each rank 126 MiB."""
    source, needed, sizes = np.zeros(128, np.int64), np.arange(65)[:, None] > 0, np.full(128, 2**20)
    first, second = hops(source, np.broadcast_to(needed, (65, 128)), sizes)
    assert first.traffic(sizes)[0].tolist() == [128 * 2**20] + [0] * 64
    assert second.traffic(sizes)[0].tolist() == [0] + [126 * 2**20] * 64
    assert (first.rounds(sizes), second.rounds(sizes)) == (8, 8)
