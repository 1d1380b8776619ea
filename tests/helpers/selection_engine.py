"""An engine and a scorer without a model, for group selection in test_selection.py and its worker."""

import contextlib

import numpy as np

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.rollout.engine import Completion

GENERATIONS = 2


def prompts(count: int, first: int = 0) -> list[Prompt]:
    """Return ``count`` prompts with the data numbers ``first``, ``first`` + 1, ..."""
    return [Prompt(id=first + p, ids=[first + p], row={"number": first + p}, source="made up") for p in range(count)]


class CountingEngine:
    """An engine without a limit of concurrency; a completion takes ``polls(id of its prompt)`` polls."""

    def __init__(self, polls, replica: int | None = 0, num_replicas: int = 1, is_lead: bool = True):
        self.replica, self.num_replicas, self.is_lead = replica, num_replicas, is_lead
        self.polls, self.running, self.log = polls, {}, []
        self.steps = 0

    def submit(self, requests):
        for request in requests:
            self.running[request.id] = [self.polls(request.prompt_ids[0]), request]
            self.log.append((self.steps, "begin", request.prompt_ids[0]))

    def poll(self):
        self.steps += 1
        for entry in self.running.values():
            entry[0] -= 1
        done = [request for left, request in self.running.values() if left == 0]
        for request in done:
            del self.running[request.id]
        return [Completion(r.id, [r.prompt_ids[0] + 7, r.id], None, "stop", [5, 5]) for r in done]

    def abort(self, ids):
        for i in ids:
            self.log.append((self.steps, "abort", self.running.pop(i)[1].prompt_ids[0]))

    def rollout(self, seed):
        return contextlib.nullcontext()


class InterruptibleEngine(CountingEngine):
    """A completion takes ``polls(id of the request)`` polls over all rollouts, one token each."""

    def __init__(self, *place):
        super().__init__(*place)
        self.submitted = []  # ids of all requests
        self.ended = []  # completions that ended with a sync of weights

    def sync(self):
        """Finish the step that is under way, as new weights do: what ends in it comes with the next step."""
        self.ended = self.poll()

    def submit(self, requests):
        for request in requests:
            self.running[request.id] = request, []  # the versions of its tokens
            self.submitted.append(request.id)

    def poll(self):
        self.steps += 1
        for _, versions in self.running.values():
            versions.append(self.rollouts)
        done = [number for number, (request, own) in self.running.items() if self.whole(request, len(own))]
        before, self.ended = self.ended, []
        return before + [self.completion(*self.running.pop(number), "stop") for number in done]

    def whole(self, request, steps):
        return len(request.begun_ids) + steps == self.polls(request.id)

    def completion(self, request, versions, reason):
        ids = [request.prompt_ids[0] + 7] * len(versions)
        completion = Completion(request.id, ids, [-1.0] * len(versions), reason, list(versions))
        return completion.after(request.begun)

    def unfinished(self):
        return [self.completion(*self.running[number], "abort") for number in sorted(self.running)]

    def interrupt(self):
        unfinished = self.unfinished()
        self.running.clear()
        return unfinished

    def rollout(self, seed):
        self.rollouts = seed
        return contextlib.nullcontext()


class TableScorer:
    """A scorer with the rewards ``rewards(number of the row, place of the completion in its group)``."""

    failures = ()

    def __init__(self, rewards):
        self.rewards, self.values = rewards, {}

    def submit(self, key, sample, member=None):
        self.values[key] = self.rewards(sample.row["number"], key % GENERATIONS)

    def wait(self, keys):
        return np.array([[self.values[key]] for key in keys], np.float32).reshape(-1, 1)

    finish = wait


class Letters:
    """A tokenizer with only the method that scoring needs."""

    @staticmethod
    def decode(ids):
        return " ".join(map(str, ids))
