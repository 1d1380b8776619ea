"""What all ranks learn of rank 0 and of a lost engine, and how long they wait for one another."""

import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.parallel import agreement, initialize
from megatron_grpo.parallel.agreement import (
    all_ranks_agree,
    device_answers,
    on_rank_0,
    peer_has_ended,
    raised_on_every_rank,
)
from megatron_grpo.utils.errors import EngineLost, GrpoError, InputError


def test_the_rank_that_lost_the_engine_raises_what_it_raised(one_process):
    with raised_on_every_rank():
        pass
    with pytest.raises(EngineLost, match="vLLM is gone"), raised_on_every_rank():
        raise EngineLost("vLLM is gone")
    with raised_on_every_rank():  # nothing is left of the one before
        pass


def test_arrays_of_rank_0_are_sent_and_received_without_a_copy():
    """Also empty, read-only and transposed ones."""
    large, fixed = np.arange(100_000), np.arange(7)
    fixed.flags.writeable = False
    value = {"large": large, "none": np.empty(0, np.int64), "fixed": fixed, "turned": np.arange(6).reshape(2, 3).T}
    store, received, places = dist.HashStore(), [], []

    def rank(number: int) -> None:
        group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=60))

        def broadcast(tensor, root):
            if len(tensor.shape) and len(tensor) == large.nbytes:
                places.append((number, tensor.data_ptr()))
            return group.broadcast(tensor, root)

        like = SimpleNamespace(rank=group.rank, size=group.size, broadcast=broadcast)
        result = on_rank_0(lambda: value, group=like)
        if number:
            received.append(result)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (result,) = received
    assert dict(places) == {0: large.ctypes.data, 1: result["large"].ctypes.data}
    assert result.keys() == value.keys() and all(np.array_equal(result[name], value[name]) for name in value)
    assert result["turned"].shape == (3, 2) and result["large"].flags.writeable


def test_a_rank_learns_from_another_ones_loss(one_process, monkeypatch):
    store = dist.distributed_c10d._get_default_store()

    def other_rank(flag, op, group, async_op):
        store.compare_set(f"megatron_grpo/engine_lost/{agreement._contexts}", "", "EngineLost\nvLLM is gone on rank 1")
        flag.fill_(1)
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", other_rank)
    with pytest.raises(EngineLost, match="vLLM is gone on rank 1"), raised_on_every_rank():
        pass


@pytest.mark.parametrize("lost", [True, False])
def test_a_rank_waits_with_a_clock_only_after_a_loss(one_process, monkeypatch, lost):
    """A rank that has not come is late, or waits for a lost engine: the store tells."""
    store, looks = dist.distributed_c10d._get_default_store(), []

    def comes_after_20_looks():
        looks.append(None)
        if lost and len(looks) == 2:
            key = f"megatron_grpo/engine_lost/{agreement._contexts}"
            store.compare_set(key, "", "EngineLost\nvLLM is gone on rank 1")
        return not lost and len(looks) > 20

    work = SimpleNamespace(is_completed=comes_after_20_looks, wait=lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: work)
    monkeypatch.setattr(agreement, "STORE_PAUSE", 0.0)
    monkeypatch.setattr(agreement, "timeout_of_collectives", lambda: timedelta(milliseconds=1))
    with pytest.raises(EngineLost, match="gone on rank 1") if lost else nullcontext(), raised_on_every_rank():
        pass
    assert lost or len(looks) > 20


@pytest.mark.parametrize("lost", [True, False])
def test_a_rank_that_never_answers_leaves_the_reason_to_the_others(one_process, monkeypatch, lost):
    def timed_out(*_, **__):
        raise RuntimeError("Timed out waiting 600000ms for recv operation to complete")

    monkeypatch.setattr(dist, "all_reduce", timed_out)
    expected, message = (EngineLost, "vLLM is gone") if lost else (RuntimeError, "Timed out")
    with pytest.raises(expected, match=message), raised_on_every_rank():
        if lost:
            raise EngineLost("vLLM is gone")


def test_other_errors_leave_at_once(one_process, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: pytest.fail("the other ranks are not waited for"))
    with pytest.raises(GrpoError, match="a flag"), raised_on_every_rank():
        raise GrpoError("a flag")


def test_a_device_that_is_blocked_or_broken_does_not_answer(monkeypatch):
    assert device_answers()  # a CPU
    blocked = threading.Event()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: blocked.wait(60))
    assert not device_answers(0.1)
    blocked.set()
    assert device_answers(60)

    def broken(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert not device_answers(60)


def test_votes(one_process):
    assert all_ranks_agree(True) and not all_ranks_agree(False)


def test_a_rank_that_does_not_vote_is_not_waited_for(monkeypatch):
    """Two ranks, of which this process is one and nobody the other: the vote is given up long before its time-out."""
    store = dist.HashStore()
    groups = [None, None]

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, 2, timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(agreement, "host_group", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group, async_op: groups[0].allreduce([tensor]))
    began = time.monotonic()
    assert not all_ranks_agree(True, seconds=0.3)
    assert time.monotonic() - began < 30
    groups[1].allreduce([torch.tensor(1, dtype=torch.int32)]).wait()


def test_the_end_of_another_rank_is_told_apart():
    assert peer_has_ended(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1234"))
    assert not peer_has_ended(RuntimeError("CUDA out of memory")) and not peer_has_ended(OSError("Connection refused"))


def of_two_ranks(function, timeout=timedelta(seconds=60)):
    """Call a function with the group of each of two ranks, in threads; return the results, or the errors."""
    store, results = dist.HashStore(), [None, None]

    def rank(number: int) -> None:
        group = dist.ProcessGroupGloo(store, number, 2, timeout)
        try:
            results[number] = function(group)
        except (GrpoError, RuntimeError) as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_what_rank_0_finds_is_everyones():
    calls = []
    found = {"rows": np.arange(1000), "files": ["a.jsonl"]}
    first, second = of_two_ranks(lambda group: on_rank_0(lambda: calls.append(0) or found, group=group))
    assert calls == [0] and first is found
    assert second["files"] == ["a.jsonl"] and (second["rows"] == found["rows"]).all()
    assert on_rank_0(lambda value: value, 5) == 5  # without process groups


@pytest.mark.parametrize(
    "error, problem, message",
    [
        (GrpoError("row 7 is bad"), "", "row 7 is bad"),
        (GrpoError("no room"), "out cannot be written", "out cannot be written: no room"),
        (InputError("a.safetensors is damaged"), "out cannot be written", "a.safetensors is damaged"),
        (FileNotFoundError(2, "No such file or directory", "a"), "", "a: No such file or directory"),
        (OSError("disk"), "out cannot be written", "out cannot be written: disk"),
    ],
)
def test_an_error_of_rank_0_is_everyones(error, problem, message):
    def fail():
        raise error

    errors = of_two_ranks(lambda group: on_rank_0(fail, problem=problem, group=group))
    assert [type(one) for one in errors] == [GrpoError, GrpoError] and [str(one) for one in errors] == [message] * 2
    with pytest.raises(GrpoError) as alone:
        on_rank_0(fail, problem=problem)
    assert str(alone.value) == message


def test_rank_0_may_read_for_longer_than_the_time_out(monkeypatch):
    """Rank 0 reads until the wait of another pair of ranks, which begins later, has timed out."""
    short, reading, over = timedelta(milliseconds=200), threading.Event(), threading.Event()

    def read():
        reading.set()
        assert over.wait(60)
        return "rows"

    def patient(group):
        joint = SimpleNamespace(group=group)
        monkeypatch.setattr(initialize, "_joint", joint)
        initialize.wait_without_time_out()
        return on_rank_0(read, group=group)

    def impatient(group):
        reading.wait(60)
        return on_rank_0(over.wait, 60, group=group) if group.rank() == 0 else on_rank_0(None, group=group)

    def first_pair():
        results.append(of_two_ranks(patient, short))

    monkeypatch.setattr(initialize, "host_group", lambda: None)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda *_: None)
    results = []
    thread = threading.Thread(target=first_pair)
    thread.start()

    def waits(group):
        try:
            return impatient(group)
        finally:
            over.set()

    _, timed_out = of_two_ranks(waits, short)
    thread.join()
    assert isinstance(timed_out, RuntimeError) and results == [["rows", "rows"]]
