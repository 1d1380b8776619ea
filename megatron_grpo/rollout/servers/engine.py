"""Engine over inference servers: every receiving rank sends its share of the prompts, and rank 0 leads the servers."""

import contextlib
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_grpo.parallel.agreement import device_answers
from megatron_grpo.parallel.initialize import all_finish, host_group, led_by_rank_0
from megatron_grpo.rollout.draft_counts import DraftCounts, no_drafts
from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.rollout.servers.pool import ServerPool
from megatron_grpo.rollout.servers.server import Server
from megatron_grpo.utils.errors import EngineLost

Weights = Iterator[tuple[str, torch.Tensor]]


class WeightTransfer(Protocol):
    """Interface of the methods that send weights to the servers of a run."""

    def send(self, weights: Weights, version: int, servers: ServerPool) -> None:
        """Send ``weights`` to every serving server by ``servers.update_servers(version, ...)``.

        The caller runs this on rank 0, while the other ranks iterate ``weights`` to the end. After an error the caller
        iterates the remaining weights on rank 0, too.
        """

    def close(self) -> None:
        """Free all resources."""


def receiving_ranks(args: Namespace) -> int:
    """Return how many ranks send requests to servers: one for each part of the data."""
    width = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    return dist.get_world_size() // width


def first_server(receiver: int, receivers: int, servers: int) -> int:
    """Return the server that a receiver starts with: evenly spaced, so that equal shares of prompts load all equally.

    Each receiver takes its k servers from there on. A server then gets the jobs of the receivers that start in a window
    of k servers, and the numbers floor(r S / R) in two windows of equal length differ by at most one.
    """
    return receiver * servers // receivers


class ServerEngine:
    """Engine over running servers (``--vllm-mode server``, ``--rollout-engine sglang``).

    ``receivers`` ranks, which divide the world evenly, send requests to all servers, each for its share of the prompts:
    they are this engine's replicas, and each scores what it receives. Every one has at most its part of
    ``max_in_flight`` completions at a server. Rank 0 alone checks the servers, sends weights and readmits servers; the
    others take the state of the servers from it at the start of a rollout.

    Every request has its own seed, so samples do not depend on the server or its load, except for rounding: logits
    depend on the batch in which a request is computed, and servers choose batches freely. A sample can therefore
    differ between two runs.
    """

    drafts: DraftCounts | None = None

    def __init__(
        self,
        servers: Sequence[Server],
        transfer: WeightTransfer,
        timeout: float,
        max_in_flight: int,
        sleep_level: int = 0,
        receivers: int = 1,
    ):
        width = dist.get_world_size() // receivers
        self.is_lead, self.num_replicas = dist.get_rank() % width == 0, receivers
        self.replica = dist.get_rank() // width if self.is_lead else None
        self.has_weights = False
        self._transfer, self._sleep_level = transfer, sleep_level
        self._seed = self._version = 0
        self._pool = None
        if self.replica is not None:
            of_each, first = -(-max_in_flight // receivers), first_server(self.replica, receivers, len(servers))
            self._pool = ServerPool(servers, timeout, of_each, max_in_flight, first=first)
        self._leader = self._pool if dist.get_rank() == 0 else None
        with led_by_rank_0():
            if self._leader:
                self._leader.check()
        self.sleep()

    @property
    def engines(self) -> float:
        """See `GeneratingEngine.engines`."""
        return len(self._pool.used) / self.num_replicas if self._pool else 0

    @property
    def places(self) -> int:
        """See `GeneratingEngine.places`."""
        return self._pool.max_in_flight * len(self._pool.used) if self._pool else 0

    @property
    def cache_tokens(self) -> int | None:
        tokens = self._pool.cache_tokens if self._pool else None
        return None if tokens is None else tokens // self.num_replicas

    def submit(self, requests: Iterable[Request]) -> None:
        if self._pool:
            self._pool.submit(requests, self._seed)

    def poll(self) -> list[Completion]:
        return self._pool.poll() if self._pool else []

    def abort(self, ids: Iterable[int]) -> None:
        if self._pool:
            self._pool.abort(ids)

    @contextlib.contextmanager
    def rollout(self, seed: int) -> Iterator[None]:
        """Context of one rollout with ``seed``; all ranks leave it together."""
        self._seed = seed
        with led_by_rank_0():
            if self._leader:
                self._leader.refresh()
                self._leader.drafts = None if self._leader.drafts is None else no_drafts()
        if self.num_replicas > 1:
            states = [self._leader.states() if self._leader else []]
            dist.broadcast_object_list(states, src=0, group=host_group())
            if self._pool and not self._leader:
                self._pool.adopt(states[0])
        with all_finish():
            try:
                yield
                if self._leader:
                    self._leader.read_drafts()
                    self.drafts = self._leader.drafts
            finally:
                if self._pool:
                    self._pool.end_rollout()

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        with led_by_rank_0():
            answers = True
            try:
                if self._leader:
                    self._transfer.send(weights, version, self._leader)
            except EngineLost:
                answers = device_answers()  # not after a blocked NCCL call
                raise
            finally:  # iterating is collective, so rank 0 must reach the end after an error as well
                for _ in weights if answers else ():
                    pass
        self.has_weights, self._version = True, version

    def compare_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[str] | None:
        """Return the tensors, by the servers' names, that change when the same weights are sent again."""
        before: dict[str, dict[str, str] | None] = {}
        after: dict[str, dict[str, str] | None] = {}
        with led_by_rank_0():
            if self._leader:
                self._leader.each(partial(_read_checksums, before))
            has_checksums = torch.tensor(bool(before) and None not in before.values())
        dist.broadcast(has_checksums, src=0, group=host_group())
        if not has_checksums:
            return None
        self.update_weights(weights, self._version)
        with led_by_rank_0():
            if self._leader:
                self._leader.each(partial(_read_checksums, after))
        return [line for url in after for line in _changed(url, before[url] or {}, after[url] or {})]

    def wake_weights(self) -> None:
        """Probe all servers and allocate memory for their weights.

        Sets ``has_weights`` on all ranks; it is False if a restarted or readmitted server needs a sync.
        """
        with led_by_rank_0():
            current = torch.tensor(self._leader.refresh() if self._leader else False)
            if self._leader:
                self._leader.each(lambda server: server.wake("weights"), "wake up")
        dist.broadcast(current, src=0, group=host_group())
        self.has_weights = bool(current)

    def device_bytes(self) -> tuple[int, int]:
        return 0, 0

    def wake_cache(self) -> None:
        with led_by_rank_0():
            if self._leader:
                self._leader.each(lambda server: server.wake("kv_cache"), "wake up")

    def sleep(self) -> None:
        """Free the servers' device memory as --sleep-level says; without it they keep their memory."""
        if self._sleep_level:
            with led_by_rank_0():
                if self._leader:
                    self._leader.sleep(keeps_weights=self._sleep_level < 2)

    def close(self) -> None:
        self._transfer.close()
        if self._pool:
            self._pool.close()


async def _read_checksums(checksums: dict[str, dict[str, str] | None], server: Server) -> None:
    checksums[server.url] = await server.checksums()


def _changed(url: str, before: dict[str, str], after: dict[str, str]) -> list[str]:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [f"{name} of {url}: it changes when the same weights are sent again" for name in names]
