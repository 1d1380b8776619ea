"""Engine ranks with servers: the weights are written once on each host, and removed when all servers have read them."""

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.rollout.weight_sync import transfer
from megatron_grpo.rollout.weight_sync.transfer import CheckpointTransfer, HostCopy, copy_of_host
from megatron_grpo.utils.errors import EngineLost, GrpoError

RANKS = 3
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


class Servers:
    """The pool of one rank: notes the files that its servers read, and when."""

    timeout = 1.0

    def __init__(self, last, error=None):
        self.read, self._last, self._error = [], last, error

    def update_servers(self, version, load):
        if self._error is not None:
            raise self._error
        if self._last is not None:
            self._last.wait(30)  # the others have read before
        coroutine = load(SimpleNamespace(load_weights=self._load))
        with pytest.raises(StopIteration):
            coroutine.send(None)

    async def _load(self, directory, timeout):
        self.read.append((directory, sorted(path.name for path in Path(directory).iterdir())))


def send(tmp_path, monkeypatch, pools, weights=lambda rank: iter(WEIGHTS.items())):
    """Send weights on all ranks, which are threads; return the error of each."""
    monkeypatch.setattr(transfer.os, "getpid", lambda: threading.get_ident())  # a directory of each rank
    store, errors = dist.HashStore(), [None] * RANKS
    store.set_timeout(timedelta(seconds=30))
    left = [weights(rank) for rank in range(RANKS)]

    def run(rank):
        try:
            one = CheckpointTransfer(str(tmp_path), HostCopy(store, rank, RANKS, "host"))
            one.send(left[rank], 7, pools[rank])
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank still waits"
    assert not list(tmp_path.iterdir()), "files are left"
    assert all(next(iterator, None) is None for iterator in left), "a rank left the stream early"
    return errors


def test_the_servers_of_all_ranks_read_one_copy(tmp_path, monkeypatch):
    """The writer's servers are the first to have read: the files stay until the last has."""
    last = threading.Event()
    pools = [Servers(None), Servers(last), Servers(None)]
    timer = threading.Timer(0.2, last.set)
    timer.start()
    assert send(tmp_path, monkeypatch, pools) == [None] * RANKS
    assert [files for pool in pools for _, files in pool.read] == [["model-00000.safetensors"]] * RANKS
    assert len({directory for pool in pools for directory, _ in pool.read}) == 1


def test_a_copy_that_cannot_be_written_fails_on_all_ranks(tmp_path, monkeypatch):
    """The disk is full: nobody waits for the files."""

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer, "save_tensors", full)
    drained = [iter(()) if rank == 0 else iter(WEIGHTS.items()) for rank in range(RANKS)]
    monkeypatch.setattr(transfer, "buckets", lambda weights, size: [list(weights)])
    errors = send(tmp_path, monkeypatch, [Servers(None) for _ in range(RANKS)], lambda rank: drained[rank])
    assert all(isinstance(error, GrpoError) and "No space left" in str(error) for error in errors)


@pytest.mark.parametrize("lost", range(RANKS))
def test_a_rank_that_has_lost_its_servers_does_not_stop_the_others(tmp_path, monkeypatch, lost):
    pools = [Servers(None, EngineLost("no server is left") if rank == lost else None) for rank in range(RANKS)]
    errors = send(tmp_path, monkeypatch, pools)
    assert [isinstance(error, EngineLost) for error in errors] == [rank == lost for rank in range(RANKS)]
    assert [len(pool.read) for pool in pools] == [rank != lost for rank in range(RANKS)]


@pytest.mark.parametrize(("rank", "place", "size"), [(8, 0, 8), (15, 7, 8), (16, 0, 4), (19, 3, 4)])
def test_the_ranks_of_a_host(rank, place, size):
    """20 ranks, 8 on a host: of the last 12, which are engines, 8 are on the second host and 4 on the third."""
    joint = SimpleNamespace(rank=rank, store=dist.HashStore(), group=SimpleNamespace(size=lambda: 20))
    copy = copy_of_host(joint, 12, 8)
    assert (copy._rank, copy._size) == (place, size)


def test_hosts_do_not_share_a_copy():
    store = dist.HashStore()
    for rank, host in ((4, 0), (8, 1)):
        joint = SimpleNamespace(rank=rank, store=store, group=SimpleNamespace(size=lambda: 16))
        copy = copy_of_host(joint, 12, 8)
        assert copy._rank == 0 and copy.written(lambda host=host: f"/copy/{host}", lambda: None) == f"/copy/{host}"
