"""Continuous batching: assignment of requests to slots of a replica's members, and the work of each step.

The members of a replica share experts and run their forward passes at the same time, each over its own requests. Every
rank holds the whole schedule and receives every token, so that the ranks need no further communication.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from megatron_grpo.rollout.engine import Request
from megatron_grpo.utils.errors import GrpoError

# Tokens of prompts in one step, unless a single prompt is longer; bounds the step's memory.
PROMPT_TOKENS = 8192


@dataclass(eq=False)
class Running:
    """A running request in a slot."""

    request: Request
    member: int
    slot: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.token_ids)


@dataclass
class Work:
    """One member's part of a step: new prompts, each with the requests that share it, and running completions."""

    prompts: list[list[Running]] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)

    @property
    def sampled(self) -> list[Running]:
        """The requests that receive a token, in the order of the step's rows."""
        return [request for prompt in self.prompts for request in prompt] + self.running

    @property
    def num_tokens(self) -> int:
        return sum(len(prompt[0].request.prompt_ids) for prompt in self.prompts) + len(self.running)


class Scheduler:
    """Schedule of at most ``slots`` requests at a time, each of at most ``length`` tokens, on each of ``members``.

    ``decode`` returns the text of ids, for stop words.
    """

    def __init__(self, members: int, slots: int, length: int, decode: Callable[[list[int]], str]):
        self.length, self.decode = length, decode
        self.waiting: deque[Request] = deque()
        self.running: list[dict[int, Running]] = [{} for _ in range(members)]  # by slot
        self._free = [list(reversed(range(slots))) for _ in range(members)]

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; GrpoError for a request that is longer than a slot."""
        for request in requests:
            longest = len(request.prompt_ids) + request.sampling.max_tokens
            if longest > self.length or not len(request.prompt_ids):
                raise GrpoError(
                    f"a prompt of {len(request.prompt_ids)} tokens with {request.sampling.max_tokens} to come does not "
                    f"fit into the engine's {self.length} tokens a sequence (--max-prompt-length + "
                    "--max-completion-length)"
                )
            self.waiting.append(request)

    def abort(self, ids: Iterable[int]) -> None:
        """Drop waiting and running requests."""
        gone = set(ids)
        self.waiting = deque(request for request in self.waiting if request.id not in gone)
        for running in [r for slots in self.running for r in slots.values() if r.request.id in gone]:
            self._release(running)

    def unfinished(self) -> list[Running]:
        """Return all running requests, and the waiting ones as such without a token."""
        running = [running for slots in self.running for running in slots.values()]
        return [*running, *(Running(request, 0, 0) for request in self.waiting)]

    def step(self) -> list[Work]:
        """Assign waiting requests to free slots and return the next work of each member.

        All work is empty if no request is waiting or running.
        """
        works = [Work(running=list(slots.values())) for slots in self.running]
        seen: list[dict[tuple[int, ...], list[Running]]] = [{} for _ in works]  # prompts of this step
        tokens = [0 for _ in works]
        member = 0
        while self.waiting:
            prompt = tuple(self.waiting[0].prompt_ids)
            # Completions of one prompt stay on one member; a new prompt goes to the member with most free slots.
            if prompt not in seen[member] or not self._free[member]:
                member = max(range(len(works)), key=lambda m: len(self._free[m]))
            cost = 0 if prompt in seen[member] else len(prompt)
            if not self._free[member] or (tokens[member] and tokens[member] + cost > PROMPT_TOKENS):
                break
            running = Running(self.waiting.popleft(), member, self._free[member].pop())
            self.running[member][running.slot] = running
            if cost:
                seen[member][prompt] = []
                works[member].prompts.append(seen[member][prompt])
            seen[member][prompt].append(running)
            tokens[member] += cost
        return works

    def take(self, works: Sequence[Work], tokens: Sequence[int], log_probs: Sequence[float]) -> list[Running]:
        """Append the step's tokens, in the order of all members' rows, to the completions; return finished ones."""
        finished = []
        rows = [running for work in works for running in work.sampled]
        for running, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            running.token_ids.append(token)
            running.log_probs.append(log_prob)
            running.finish_reason = self._finish_reason(running)
            if running.finish_reason:
                self._release(running)
                finished.append(running)
        return finished

    def _finish_reason(self, running: Running) -> str | None:
        sampling, ids = running.request.sampling, running.token_ids
        if ids[-1] in sampling.stop_token_ids:
            return "stop"
        if sampling.stop:
            window = running.request.stop_word_window()
            text = self.decode([*running.request.begun_turn_ids, *ids[-window:]][-window:])
            if any(word in text for word in sampling.stop):
                return "stop"
        return "length" if len(ids) >= sampling.max_tokens else None

    def _release(self, running: Running) -> None:
        del self.running[running.member][running.slot]
        self._free[running.member].append(running.slot)
