"""Receivers of a made-up world: each knows its own requests only, and together they use all servers alike."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.engine import Request
from megatron_grpo.rollout.servers import engine as engines
from megatron_grpo.rollout.servers.engine import ServerEngine
from megatron_grpo.rollout.servers.server import Status

SIZE = 8  # completions of a prompt
WIDTH = 2  # ranks of a data-parallel replica: one of them receives


class BusyServer:
    """A server that takes requests and answers none."""

    version, process, exclusion_reason, failures, next_probe, last_progress, progress = 1, "", None, 0, 0.0, 0.0, None
    drafts, in_flight = None, 0
    probed, confirmed = 0.0, float("inf")  # no request waits for a probe
    shared = ()

    async def check(self):
        """Accept the server."""

    async def status(self, timeout):
        return Status("", None)

    async def generate(self, requests, seed):
        await asyncio.Event().wait()

    async def close(self):
        """There is no connection."""


def in_flight(monkeypatch, receivers: int, servers: int, prompts: int, max_in_flight: int) -> list[int]:
    """Return the jobs at each server after every receiver has sent what it may."""
    total = [0] * servers
    monkeypatch.setattr(engines, "led_by_rank_0", contextlib.nullcontext)
    for rank in range(0, WIDTH * receivers, WIDTH):
        world = SimpleNamespace(get_rank=lambda rank=rank: rank, get_world_size=lambda: WIDTH * receivers)
        monkeypatch.setattr(engines, "dist", world)
        own = [BusyServer() for _ in range(servers)]
        engine = ServerEngine(own, SimpleNamespace(close=lambda: None), 60.0, max_in_flight, receivers=receivers)
        sampling = Sampling(8)
        engine.submit(Request(p * SIZE + g, [p + 1], sampling) for p in range(prompts) for g in range(SIZE))
        engine._pool.poll(timeout=0)
        assert max(server.in_flight for server in own) <= max(SIZE, max_in_flight // receivers)
        total = [jobs + server.in_flight // SIZE for jobs, server in zip(total, own, strict=True)]
        engine.close()
    return total


@pytest.mark.parametrize(
    ("receivers", "servers", "prompts", "max_in_flight"),
    [
        (64, 32, 16, 256),
        (64, 32, 8, 1024),
        (8, 32, 3, 256),
        (3, 5, 4, 256),
        (16, 4, 1, 64),
        (5, 32, 7, 512),
        (1, 4, 9, 64),
    ],
)
def test_all_servers_have_the_same_work(monkeypatch, receivers, servers, prompts, max_in_flight):
    jobs = in_flight(monkeypatch, receivers, servers, prompts, max_in_flight)
    assert sum(jobs) == receivers * prompts, "a receiver kept requests back"
    assert max(jobs) - min(jobs) <= 1, jobs
