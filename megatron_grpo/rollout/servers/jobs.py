"""Jobs that wait for a server, and which server each of them should go to."""

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megatron_grpo.rollout.engine import Request
from megatron_grpo.rollout.servers.server import Server

# A job goes to the server that has computed its first tokens. This one may have at most so many completions more than
# the least busy one, and a quarter more besides if the job is a further turn, whose past is long.
NEAR = 8
HOMES = 2**16  # sessions and prompts for which a server is remembered
PASSES = 64  # so many later jobs may overtake a job whose server is full


@dataclass
class Job:
    """Requests that differ only in their id and are sent to a server together."""

    requests: list[Request]
    seed: int
    failures: int = 0
    aborted: set[int] = field(default_factory=set)  # ids of aborted requests
    dispatched: float = 0.0  # time of the newest dispatch
    passed: int = 0  # by later jobs in the queue

    @cached_property
    def sessions(self) -> list[int]:
        """The sessions of the requests: jobs of one session begin with the same tokens."""
        return [request.id if request.session is None else request.session for request in self.requests]

    @cached_property
    def prompt(self) -> int:
        """A hash of the prompt, with its images: jobs of one prompt begin with the same tokens."""
        first = self.requests[0]
        return hash((tuple(first.prompt_ids), tuple(first.images.names) if first.images is not None else ()))

    def abort(self, ids: set[int]) -> bool:
        """Note that requests are aborted; return whether all of the job are."""
        self.aborted |= ids
        return self.aborted.issuperset(request.id for request in self.requests)

    def restart(self) -> None:
        """Drop what has arrived since the newest dispatch."""


def jobs_of(requests: Iterable[Request], seed: int, size: int) -> Iterator[Job]:
    """Return jobs of at most ``size`` consecutive requests of one prompt each, so that its prefill runs once.

    The samples of a request depend on ``seed``, the first ``id`` of its prompt and its index within the prompt; those
    of a request with a session on its own ``id`` and the number of tokens before it.
    """
    group: list[Request] = []
    for request in [*requests, None]:
        if group and (request is None or len(group) == size or not _same_job(group[0], request)):
            before = group[0].sampled_before + len(group[0].begun_ids)
            words = np.random.SeedSequence([seed, group[0].id, *([before] if before else [])]).generate_state(1)
            yield Job(group, int(words[0]) // 2)
            group = []
        if request is not None:
            group.append(request)


def _same_job(first: Request, second: Request) -> bool:
    if first.session is not None or second.session is not None:  # when programs go on decides which come together
        return False
    if first.sampling.temperature == 0:  # vLLM refuses several greedy completions of one prompt
        return False
    if first.begun_ids or second.begun_ids or first.sampled_before != second.sampled_before:  # further turns
        return False
    same_prompt = second.prompt_ids is first.prompt_ids or list(second.prompt_ids) == list(first.prompt_ids)
    # Images of one size have the same tokens.
    return same_prompt and second.images is first.images and second.sampling == first.sampling


class JobQueue(deque[Job]):
    """Jobs that wait, the first of them first."""

    def take(self, size: int, full: Sequence[Server], homes: "Homes") -> Job:
        """Take the first job of at most ``size`` requests that does not wait for one of the full servers.

        That is the first of all if every job waits, or if enough have passed it.
        """
        place = 0
        if full and self[0].passed < PASSES:
            for i, job in enumerate(itertools.islice(self, PASSES)):
                if len(job.requests) <= size and not any(home in full for home in homes.of_sessions(job)):
                    place = i
                    break
        for job in itertools.islice(self, place):
            job.passed += 1
        job = self[place]
        del self[place]
        return job

    def abort(self, ids: set[int]) -> None:
        """Drop the jobs whose requests have all been aborted."""
        kept = [job for job in self if not job.abort(ids)]
        self.clear()
        self.extend(kept)


class Homes(OrderedDict[tuple[str, int], Server]):
    """By session and by prompt: the server where a job was sent last. The newest is the last."""

    def find(self, job: Job, ready: Sequence[Server]) -> Server:
        """Return the server for a job of those that are ready, and remember it."""
        least = min(ready, key=lambda server: server.in_flight)
        home, most = self.get(("prompt", job.prompt), least), least.in_flight + NEAR
        if not least.in_flight:  # nothing is gained: an idle server computes the prompt as soon as another one
            home = least
        if known := self.of_sessions(job):
            home, most = known[-1], least.in_flight + least.in_flight // 4 + NEAR
        if home not in ready or home.in_flight > most:
            home = least
        for key in (*(("session", session) for session in job.sessions), ("prompt", job.prompt)):
            self[key] = home
            self.move_to_end(key)
        while len(self) > HOMES:
            self.popitem(last=False)
        return home

    def of_sessions(self, job: Job) -> list[Server]:
        """Return the servers that have the past of a job."""
        keys = [("session", session) for session in job.sessions]
        return [self[key] for key in keys if key in self]

    def drop(self, server: Server) -> None:
        """Forget a server, which no longer has what it has computed."""
        for key in [key for key, home in self.items() if home is server]:
            del self[key]
