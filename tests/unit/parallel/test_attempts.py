"""Ranks of one attempt agree on a name, whatever an earlier attempt has left in the store."""

import socket
import threading
import time
from argparse import Namespace
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_grpo.patches import cpu_backend

cpu_backend.install()

from megatron_grpo.parallel.initialize import agreed_attempt, join
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


@pytest.mark.parametrize(("ends", "minutes", "reason"), [(True, 10, "Failed to recv"), (False, 0.01, "timeout")])
def test_a_rank_without_rank_0_says_where_to_look(monkeypatch, ends, minutes, reason):
    """Rank 0's host ends as soon as the rank waits for it, or rank 0 does not start in time."""
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(servers[0].port)}
    for name, value in (place | {"LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)

    def end_when_it_waits() -> None:
        while not servers[0].check(["megatron_grpo/attempt/join/1"]):
            time.sleep(0.01)
        servers.clear()

    if ends:
        threading.Thread(target=end_when_it_waits).start()
    args = Namespace(distributed_timeout_minutes=minutes, rollout_engine="vllm", rollout_ranks=0)
    with pytest.raises(GrpoError, match=f"has not met the other ranks, whose store is 127.0.0.1:.*{reason}"):
        join(args)


def test_a_port_of_another_program_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        args = Namespace(distributed_timeout_minutes=0.1, rollout_engine="vllm", rollout_ranks=0)
        with pytest.raises(
            GrpoError, match=f"port {port} of host .* is taken by another program.*torchrun --standalone"
        ):
            join(args)
