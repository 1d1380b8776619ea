"""Servers as the engine of a rank of their own (``--rollout-ranks`` with ``--vllm-mode server``).

Every request is a stream of tokens, so that what has arrived is not lost: a request that new weights interrupt, or
whose server dies, goes on from its tokens, on whatever server has room. Tokens that a restarted server may have sampled
with its initial weights are dropped.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from megatron_grpo.rollout.draft_counts import DraftCounts
from megatron_grpo.rollout.engine import Completion, Request, request_seed
from megatron_grpo.rollout.servers.engine import WeightTransfer
from megatron_grpo.rollout.servers.jobs import Job
from megatron_grpo.rollout.servers.pool import Load, ServerPool
from megatron_grpo.rollout.servers.server import Server, Streamed
from megatron_grpo.weights.transfer_plan import HfTensor, Reads, whole

POLL = 0.02  # seconds that a poll waits at most: the producer looks for commands between two


@dataclass
class StreamedJob(Job):
    """One request, and what has arrived of its completion."""

    streamed: Streamed | None = None
    searched: bool = False  # whether ``streamed`` begins before what a stop word can have begun in

    def restart(self) -> None:
        if self.streamed is not None:
            self.streamed = Streamed(self.streamed.request)


def _before_stop_words(request: Request) -> Request:
    """Return the request without the newest tokens of its turn, in which a stop word can have begun.

    A server sees no stop word across the begin of what it samples, so these tokens are sampled again. Only calls of
    agents have stop words here.
    """
    again = min(request.stop_word_window(), len(request.begun_turn_ids))
    if request.begun is None or not again:
        return request
    return replace(request, begun=request.begun.part(0, len(request.begun_ids) - again))


class StreamPool(ServerPool):
    """A pool whose requests are streams, and have seeds of their own. Servers join at any time.

    With ``keeps`` running requests wait while their server loads weights, and go on under the new ones.
    """

    joins = True

    def __init__(self, servers: Sequence[Server], timeout: float, max_in_flight: int, keeps: bool = False):
        super().__init__(servers, timeout, max_in_flight)
        self._keeps = keeps

    async def _update(self, server: Server, version: int, load: Load | None) -> None:
        if not self._keeps:
            return await super()._update(server, version, load)
        await server.pause()
        await super()._update(server, version, load)  # if it fails, a part of the new weights may be there: no resume
        # The tokens before the pause have arrived: loading takes longer than their way.
        for job, owner in self._running.values():
            if owner is server and isinstance(job, StreamedJob) and job.streamed is not None:
                job.streamed.version = version
        await server.resume()

    def submit_streams(self, requests: Iterable[Request]) -> None:
        """Queue requests."""
        for request in requests:
            assert request.seed is not None
            self._queue.append(StreamedJob([request], request.seed, streamed=Streamed(request)))

    async def _answers(self, job: Job, server: Server) -> list[Completion]:
        assert isinstance(job, StreamedJob) and job.streamed is not None
        request, sampling = job.streamed.continued(), job.requests[0].sampling
        begun = request.begun
        if begun is not None and begun.token_ids and begun.mask[-1]:  # the server may have died after the last token
            ended = "stop" if begun.token_ids[-1] in sampling.stop_token_ids else None
            ended = ended or ("length" if begun.num_sampled >= sampling.max_tokens else None)
            if ended:
                return [Streamed(request).completion(ended)]
        began_here = len(request.begun_ids) > len(job.requests[0].begun_ids)
        if job.streamed.ids or not job.searched:
            request, job.searched = _before_stop_words(request), True
        seed = request_seed(job.seed, request.id, len(request.begun_ids)) if began_here else job.seed
        job.streamed = Streamed(request)
        return [await server.stream(job.streamed, seed)]

    def unfinished(self) -> list[Completion]:
        """Return what all requests have so far, in order of their ids."""
        jobs = [*(job for job, _ in self._running.values()), *self._queue]
        streams = [job.streamed for job in jobs if isinstance(job, StreamedJob) and job.streamed is not None]
        return sorted((stream.completion() for stream in streams), key=lambda completion: completion.id)

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests."""
        return not self._running and not self._queue

    def drop_all(self) -> None:
        """Drop all requests and close their connections, so that the servers abort them."""
        self._queue.clear()
        for task, (_, server) in list(self._running.items()):
            self._cancel(task, server)


class ServerStream:
    """Engine of one rank over its servers, whose requests can be continued later, under other weights.

    It has no collectives. Weights arrive while nothing runs, or with ``keeps`` while requests wait at the servers.
    Servers that have failed or restarted receive the newest ones again when they answer, while the others generate.
    """

    num_replicas, is_lead = 1, True

    def __init__(
        self,
        servers: Sequence[Server],
        transfer: WeightTransfer,
        timeout: float,
        max_in_flight: int,
        replica: int = 0,
        keeps: bool = False,
    ):
        self.replica: int | None = replica
        self.has_weights = False
        self._transfer, self._pool = transfer, StreamPool(servers, timeout, max_in_flight, keeps)
        self._pool.check()

    @property
    def engines(self) -> int:
        """See `GeneratingEngine.engines`."""
        return len(self._pool.used)

    @property
    def places(self) -> int:
        """See `GeneratingEngine.places`."""
        return self._pool.max_in_flight * self.engines

    @property
    def cache_tokens(self) -> int | None:
        """See `GeneratingEngine.cache_tokens`."""
        return self._pool.cache_tokens

    def submit(self, requests: Iterable[Request]) -> None:
        """See `Submits.submit`."""
        self._pool.submit_streams(requests)

    def poll(self) -> list[Completion]:
        """Return the completions that have finished since the last call."""
        return self._pool.poll(POLL)

    def watch(self) -> None:
        """Probe the servers, and let excluded ones join, while there are no requests to `poll` for."""
        if self._pool.is_idle:
            self._pool.poll(0.0)

    def abort(self, ids: Iterable[int]) -> None:
        """See `Submits.abort`."""
        self._pool.abort(ids)

    def unfinished(self) -> list[Completion]:
        """See `InterruptibleEngine.unfinished`."""
        return self._pool.unfinished()

    def interrupt(self) -> list[Completion]:
        """See `InterruptibleEngine.interrupt`."""
        found = self._pool.unfinished()
        self._pool.drop_all()
        return found

    def rollout(self, seed: int) -> AbstractContextManager[None]:
        """Do nothing: every request has a seed."""
        return contextlib.nullcontext()

    @property
    def drafts(self) -> DraftCounts | None:
        """Return the counts of `GeneratingEngine.drafts` as of the last probe of each server."""
        return self._pool.drafts

    def reads(self, tensors: Sequence[HfTensor]) -> Reads:
        """Return that servers read whole tensors."""
        return Reads.of_loaders(whole(tensors))

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Send new weights to all servers that answer."""
        self._pool.refresh()
        try:
            self._transfer.send(weights, version, self._pool)
        finally:
            for _ in weights:  # the trainer sends to the end
                pass
        self.has_weights = True

    def close(self) -> None:
        """Close the connections."""
        self._transfer.close()
        self._pool.close()
