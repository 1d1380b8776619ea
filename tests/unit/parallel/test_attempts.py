"""Ranks of one attempt agree on a name, whatever an earlier attempt has left in the store."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.parallel.initialize import agreed_attempt
from megatron_grpo.utils.errors import GrpoError


def test_attempts_with_one_store_have_different_names():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt(world_size: int) -> set[str]:
        names: list[str] = []

        def rank(number: int) -> None:
            store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
            names.append(agreed_attempt(store, number, world_size, 60.0))

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(names) == world_size
        return set(names)

    found = [attempt(4), attempt(4), attempt(3), attempt(1)]
    assert all(len(names) == 1 for names in found) and len(set.union(*found)) == 4


def test_a_rank_that_does_not_start_is_named():
    with pytest.raises(GrpoError, match="ranks 1, 2 have not started within 0 s"):
        agreed_attempt(dist.HashStore(), 0, 3, 0.1)
