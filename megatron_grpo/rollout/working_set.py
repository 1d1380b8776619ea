"""Which episodes generate: as many as have room in the engine's cache together.

An engine keeps the keys and values of an episode while a tool works, until another request needs the memory. If all
episodes together are longer than the cache, each turn finds its history gone, the engine computes it again, and that
takes the memory of the next one. `WorkingSet` therefore lets turns wait before the engine. An episode that has entered
the set stays in it until it ends, or until the set has grown larger than the cache: then the newest ones leave whose
tools work. Of the turns that wait, the oldest episode's passes first.

Where tools take long, few members generate, and steps of few requests take longer than histories that are computed
again. Then all turns pass for a while (`_choose`).
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_grpo.rollout.engine import Completion, GeneratingEngine, Request
from megatron_grpo.utils.log import log

CHUNK = 256  # tokens of a first prompt that are counted once for all episodes that begin with them
FULL = 0.9  # of the cache that the set may have: what engines forget is not always the oldest
WHILE = 8  # turns of each episode for which all pass, before the set is tried again


class Costs(Protocol):
    """Estimated seconds of an engine."""

    def turn(self, tokens: float, history: float, running: float) -> float:
        """Return those that a turn takes of the engine, of so many that run, after a history in the cache."""

    def history(self, tokens: float) -> float:
        """Return those of the computation of a history."""


@dataclass(eq=False)
class _Episode:
    """An episode. ``chunks`` has a number for each chunk of its first prompt."""

    order: tuple[bool, int]  # urgent episodes pass first, then the oldest: the smallest ids
    chunks: Sequence[int]
    own: int = 0  # tokens in the engine's cache beyond the chunks
    before: int = 0  # the same at the end of the turn before; at first, of the prompt and what was begun
    is_member: bool = False

    def beyond_chunks(self, tokens: int) -> int:
        """Return how many of its ``tokens`` are not in the chunks."""
        return max(0, tokens - CHUNK * len(self.chunks))


class WorkingSet:
    """``engine`` for episodes. An episode is the requests with one id, one after the other; `end` ends it.

    All requests pass without ``costs``, and where the engine keeps no tokens (`GeneratingEngine.cache_tokens`). All
    ranks of a replica decide alike. With ``resumes``, a resumed run decides as one that goes on.
    """

    def __init__(self, engine: GeneratingEngine, costs: Costs | None = None, resumes: bool = True):
        self._engine, self._costs, self._resumes = engine, costs, resumes
        self._episodes: dict[int, _Episode] = {}  # by id, as all that follow
        self._waiting: dict[int, Request] = {}
        self._passed: dict[int, Request] = {}  # those that the engine has
        self._idle: dict[int, _Episode] = {}  # the members of which it has none
        self._queue: list[tuple[bool, tuple[bool, int], int]] = []  # a heap of (may wait, order, id), and some aborted
        # Of the members: their number, their tokens beyond the chunks, and how many begin with each chunk.
        self._members, self._own, self._chunks = 0, 0, Counter[int]()
        self._told = False
        self._forget()

    def _forget(self) -> None:
        """Forget what turns are like."""
        self._turns = self._turn_tokens = self._grown = 0  # that have ended
        self._all_pass = False
        # Since the last choice: the turns that ended, the steps, and the requests that ran in all of them.
        self._ended = self._steps = self._ran = 0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine."""
        return getattr(self._engine, name)

    def submit(self, requests: Iterable[Request]) -> None:
        """See `Submits.submit`; the next `poll` lets them pass, so that nothing depends on when they come before it."""
        if self._costs is None:
            self._engine.submit(requests)
            return
        if self._resumes and not self._episodes:
            self._forget()
        prompt: Sequence[int] = ()
        chunks: list[int] = []
        for request in requests:
            episode = self._episodes.get(request.id)
            if episode is None:
                if request.prompt_ids is not prompt:  # that of the group
                    prompt, chunks = request.prompt_ids, _chunks(request.prompt_ids)
                episode = _Episode((not request.urgent, request.id), chunks)
                episode.before = episode.beyond_chunks(_tokens(request))
                self._episodes[request.id] = episode
            self._waiting[request.id] = request
            heapq.heappush(self._queue, (not episode.is_member, episode.order, request.id))

    def poll(self) -> list[Completion]:
        """See `Submits.poll`."""
        if self._costs is None:
            return self._engine.poll()
        self._let_pass()
        self._steps += 1
        self._ran += min(len(self._passed), self._engine.places)
        completions = self._engine.poll()
        for completion in completions:
            request, episode = self._passed.pop(completion.id), self._episodes[completion.id]
            self._idle[completion.id] = episode
            self._has(episode, len(request.prompt_ids) + len(completion.token_ids))
            self._grown += episode.own - episode.before
            episode.before = episode.own
            self._ended += 1
            self._turns += 1
            self._turn_tokens += len(completion.token_ids) - len(request.begun_ids)
        if completions:
            self._choose()
            self._shrink()
        return completions

    def end(self, number: int) -> None:
        """Forget an episode, if there is one; the engine has no request of it."""
        episode = self._episodes.get(number)
        if episode is not None and episode.is_member:
            self._leave(number)
        self._episodes.pop(number, None)

    def abort(self, ids: Iterable[int]) -> None:
        """See `Submits.abort`; the episodes end."""
        ids = list(ids)
        self._engine.abort([number for number in ids if self._waiting.pop(number, None) is None])
        for number in ids:
            self._passed.pop(number, None)
            self.end(number)

    def unfinished(self) -> list[Completion]:
        """See `InterruptibleEngine.unfinished`."""
        return self._with_waiting(self._engine.unfinished())  # type: ignore[attr-defined]

    def interrupt(self) -> list[Completion]:
        """See `InterruptibleEngine.interrupt`; what follows are new episodes."""
        stopped = self._with_waiting(self._engine.interrupt())  # type: ignore[attr-defined]
        self._members = self._own = 0
        for kept in (self._episodes, self._waiting, self._passed, self._idle, self._queue, self._chunks):
            kept.clear()
        return stopped

    def _with_waiting(self, completions: list[Completion]) -> list[Completion]:
        """Return the completions, and those of the requests that wait, in order of their ids."""
        never_ran = [
            Completion(request.id, [], None, "abort", []).after(request.begun) for request in self._waiting.values()
        ]
        return sorted([*completions, *never_ran], key=lambda completion: completion.id)

    # ---- the set

    @property
    def _capacity(self) -> float:
        tokens = self._engine.cache_tokens
        return math.inf if tokens is None else FULL * tokens

    def _let_pass(self) -> None:
        """Submit the requests that have room, in their order."""
        passing: list[Request] = []
        while self._queue:
            number = self._queue[0][-1]
            request = self._waiting.get(number)
            if request is not None:
                episode, tokens = self._episodes[number], _tokens(request)
                passes = self._all_pass or episode.is_member or not self._passed or _belongs(request, passing)
                if not (passes or self._has_room(episode, tokens)):
                    self._tell()
                    break
                if not episode.is_member:
                    self._enter(episode)
                self._idle.pop(number, None)
                self._has(episode, tokens)
                self._passed[number] = self._waiting.pop(number)
                passing.append(request)
            heapq.heappop(self._queue)
        if passing:
            self._engine.submit(passing)

    def _tell(self) -> None:
        if not self._told and self._engine.is_lead:
            log(
                f"turns wait: {self._members + 1} of {len(self._episodes)} episodes are longer than the "
                f"{self._engine.cache_tokens:,} tokens of the engine's cache; more room: a higher "
                "gpu_memory_utilization of vLLM, kv_cache_dtype fp8, or fewer episodes at a time"
            )
        self._told = True

    def _has_room(self, episode: _Episode, tokens: int) -> bool:
        """Return whether the set with an episode of so many tokens is no larger than the cache."""
        own = tokens - CHUNK * sum(chunk in self._chunks for chunk in episode.chunks)
        return self._tokens() + own + self._to_come <= self._capacity

    def _choose(self) -> None:
        """Choose whether all requests pass, when each member has had a turn since the last choice.

        More turns then run at a time, but most begin with the computation of their history.
        """
        assert self._costs is not None
        if self._ended < self._members * (WHILE if self._all_pass else 1):
            return
        if self._all_pass or not self._waiting:
            self._all_pass = False
        else:
            turn, history = self._turn_tokens / self._turns, self._tokens() / self._members
            # vLLM needs the memory of those that run.
            most = min(self._engine.places, len(self._episodes), max(1.0, self._capacity / history))
            engines = self._engine.engines
            in_set = self._costs.turn(turn, history, self._ran / self._steps / engines)
            self._all_pass = self._costs.turn(turn, history, most / engines) + self._costs.history(history) < in_set
        self._ended = self._steps = self._ran = 0

    @property
    def _growth(self) -> int:
        """Mean tokens by which a turn and the answer before it have made an episode longer."""
        return max(0, self._grown) // max(1, self._turns)

    @property
    def _to_come(self) -> int:
        """Tokens by which a member that generates becomes longer: half of a turn, and the answer to it.

        Turns that run are halfway on average: of episodes of one turn, room for all would stay half empty. A template
        that drops reasoning makes the history shorter with each answer, and not the turn.
        """
        half_turn = self._turn_tokens // max(1, 2 * self._turns)
        return max(half_turn, self._growth - half_turn)

    def _tokens(self) -> int:
        """Return the tokens of the set: each member's, with a further turn, or with the rest of one."""
        generating = self._members - len(self._idle)
        further = self._growth * len(self._idle) + self._to_come * generating
        return self._own + CHUNK * len(self._chunks) + further

    def _shrink(self) -> None:
        """Let the newest episodes without a request leave until the others have room."""
        if self._all_pass or self._tokens() <= self._capacity:
            return
        for number in sorted(self._idle, key=lambda one: self._idle[one].order, reverse=True):
            self._leave(number)
            if self._tokens() <= self._capacity:
                return

    def _has(self, episode: _Episode, tokens: int) -> None:
        """Note how many tokens of a member the engine has."""
        own = episode.beyond_chunks(tokens)
        self._own += own - episode.own
        episode.own = own

    def _enter(self, episode: _Episode) -> None:
        episode.is_member = True
        self._members, self._own = self._members + 1, self._own + episode.own
        self._chunks.update(episode.chunks)

    def _leave(self, number: int) -> None:
        episode = self._episodes[number]
        episode.is_member = False
        self._idle.pop(number, None)
        self._members, self._own = self._members - 1, self._own - episode.own
        self._chunks.subtract(episode.chunks)
        for chunk in episode.chunks:
            if not self._chunks[chunk]:
                del self._chunks[chunk]


def _tokens(request: Request) -> int:
    """Return the tokens that a request begins with."""
    return len(request.prompt_ids) + len(request.begun_ids)


def _belongs(request: Request, passing: Sequence[Request]) -> bool:
    """Return whether a first turn follows one after the same prompt, in ``passing``: engines compute it once."""
    if not passing or request.begun_ids or passing[-1].begun_ids:
        return False
    return passing[-1].prompt_ids == request.prompt_ids


def _chunks(tokens: Sequence[int]) -> list[int]:
    """Return a number for each full chunk of a prompt, which depends on it and all tokens before it."""
    found = [0]
    for begin in range(0, len(tokens) - CHUNK + 1, CHUNK):
        found.append(hash((found[-1], tuple(tokens[begin : begin + CHUNK]))))
    return found[1:]
