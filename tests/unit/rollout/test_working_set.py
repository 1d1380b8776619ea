"""The turns that pass to an engine, against an engine that forgets the least recently used tokens, as vLLM does."""

import heapq
import itertools
from collections import OrderedDict, deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.rollout.working_set import CHUNK, WorkingSet

SAMPLING = Sampling(temperature=1.0, max_tokens=10**6)
DEAR = SimpleNamespace(turn=lambda tokens, history, running: 1 / running, history=lambda tokens: 10**9)
FREE = SimpleNamespace(turn=lambda tokens, history, running: 1 / running, history=lambda tokens: 0.0)
COMMON = list(range(10 * CHUNK))


class Cached:
    """An engine of ``places`` requests whose turns have ``turn`` tokens, and its cache by episode.

    ``computed`` counts the tokens of prompts that were not in the cache. A step takes a second.
    """

    is_lead, engines = True, 1

    def __init__(self, cache_tokens, places=1000, turn=20):
        self.cache_tokens, self.places, self.turn = cache_tokens, places, turn
        self.queue, self.running, self.idle = deque(), {}, OrderedDict()
        self.free, self.computed, self.submitted = cache_tokens, 0, []

    def submit(self, requests):
        requests = list(requests)
        self.submitted += [request.id for request in requests]
        self.queue += requests

    def abort(self, ids):
        for number in ids:
            self.queue = deque(request for request in self.queue if request.id != number)
            if found := self.running.pop(number, None):
                self.free += found[1]

    def unfinished(self):
        waiting = [Completion(r.id, [], None, "abort", []).after(r.begun) for r in self.queue]
        ran = [Completion(r.id, [7] * t, None, "abort", [0] * t).after(r.begun) for r, _, t in self.running.values()]
        return [*waiting, *ran]

    def interrupt(self):
        stopped = self.unfinished()
        self.abort([completion.id for completion in stopped])
        return stopped

    def poll(self):
        while self.queue and len(self.running) < self.places:
            request = self.queue[0]
            tokens = len(request.prompt_ids) + len(request.begun_ids)
            kept = self.idle.pop(request.id, 0)
            if not self.take(tokens - kept):
                self.idle[request.id] = kept
                break
            self.queue.popleft()
            self.computed += tokens - kept
            self.running[request.id] = [request, tokens, 0]
        ended = []
        for number, state in list(self.running.items()):
            request, held, tokens = state
            if not self.take(1):  # as vLLM, which lets one of them wait again
                request, held, _ = self.running.pop(number)
                self.free += held
                self.queue.appendleft(request)
                continue
            state[1:] = held + 1, tokens + 1
            if tokens + 1 == self.turn:
                del self.running[number]
                self.idle[request.id] = held + 1
                ended.append(Completion(number, [7] * self.turn, None, "stop", [0] * self.turn).after(request.begun))
        return ended

    def take(self, tokens):
        while self.free < tokens and self.idle:
            oldest = next(iter(self.idle))
            forgotten = min(self.idle[oldest], tokens - self.free)
            self.free, self.idle[oldest] = self.free + forgotten, self.idle[oldest] - forgotten
            if not self.idle[oldest]:
                del self.idle[oldest]
        if self.free < tokens:
            return False
        self.free -= tokens
        return True


def request(number, prompt, begun=0):
    so_far = Completion(number, [7] * begun, None, "stop", [0] * begun) if begun else None
    return Request(number, prompt, SAMPLING, begun=so_far)


def episodes(engine, costs, number=40, turns=8, answer=30, tool=3, prompt=100):
    """Run episodes to their end, and return the steps that it took. A tool takes ``tool`` steps."""
    made, now, tools, left = WorkingSet(engine, costs), 0, [], dict.fromkeys(range(number), turns)
    prompts = [[name] * prompt for name in range(number)]
    made.submit([request(name, prompts[name]) for name in range(number)])
    while left:
        now += 1
        assert now < 10**5
        back = []
        while tools and tools[0][0] <= now:
            _, name, tokens = heapq.heappop(tools)
            back.append(request(name, prompts[name], tokens))
        made.submit(back)
        for completion in made.poll():
            left[completion.id] -= 1
            if left[completion.id]:
                heapq.heappush(tools, (now + tool, completion.id, len(completion.token_ids) + answer))
            else:
                del left[completion.id]
                made.end(completion.id)
    return now


def test_histories_larger_than_the_cache_are_computed_once():
    """40 episodes of up to 500 tokens, 20,000 in all, in a cache of 5,000: without the set each turn computes its
    history, with it only what is new.
    """
    new = 40 * (100 + 7 * 30)
    every, bounded = Cached(5000), Cached(5000)
    episodes(every, None)
    episodes(bounded, DEAR)
    assert every.computed > 4 * new
    assert new <= bounded.computed < 2.5 * new  # those that leave the set have it computed once more
    assert sorted(every.submitted) == sorted(bounded.submitted)


def test_episodes_that_fit_do_not_wait():
    every, bounded = Cached(40_000), Cached(40_000)
    assert episodes(every, None) == episodes(bounded, DEAR)
    assert every.submitted == bounded.submitted and every.computed == bounded.computed == 40 * (100 + 7 * 30)


def test_all_pass_where_histories_cost_less_than_empty_places():
    """A tool takes 200 steps, and a history nothing: those that fit leave the engine idle for most of the time."""
    every, bounded, free = (Cached(5000) for _ in range(3))
    shortest = episodes(every, None, tool=200)
    assert episodes(bounded, DEAR, tool=200) > 1.8 * shortest
    assert episodes(free, FREE, tool=200) < 1.6 * shortest


def test_turns_that_run_need_room_for_half_of_their_tokens():
    """Episodes of one turn, no two of them equally far: room for all of each turn would leave places empty."""
    engine = Cached(5000, turn=200)
    made, most = WorkingSet(engine, DEAR), 0
    for now in range(1000):
        if now % 4 == 0:
            made.submit([request(now, [now] * 10)])
        for completion in made.poll():
            made.end(completion.id)
        most = max(most, len(engine.running) if now > 600 else 0)
    assert most > 1.5 * 0.9 * 5000 / 210


def test_turns_whose_reasoning_the_template_drops_need_room_for_half_of_them():
    """Each turn begins with 100 tokens, however many the turns before it had: with a half, 200 on average."""
    engine = Cached(10**6, turn=200)
    engine.cache_tokens = 5000
    made, most = WorkingSet(engine, DEAR), 0
    made.submit([request(name, [name] * 100) for name in range(40)])
    for now in range(10 * engine.turn):
        made.submit([request(completion.id, [completion.id] * 100) for completion in made.poll()])
        most = max(most, len(engine.running) if now > 3 * engine.turn else 0)
    assert 1 < most <= 0.9 * 5000 / 200


def test_a_history_that_becomes_shorter_makes_no_room_for_others():
    """100 episodes have begun a turn with 2,000 tokens of reasoning, which the next ones do not have."""
    engine = Cached(10**6, turn=10)
    engine.cache_tokens = 5000
    made, most = WorkingSet(engine, DEAR), 0
    made.submit([request(name, [name] * 100, 2000) for name in range(100)])
    for _ in range(1000):
        made.submit([request(completion.id, [completion.id] * 100) for completion in made.poll()])
        most = max(most, len(engine.running))
    assert 1 < most <= 0.9 * 5000 / 105


def test_an_interrupted_history_is_no_growth():
    engine = Cached(10**6)
    made, histories = WorkingSet(engine, DEAR), dict.fromkeys(range(10), 0)
    for _ in range(5):
        made.interrupt()  # as before new weights
        made.submit([request(name, [name] * 100, begun) for name, begun in histories.items()])
        ended = []
        while not ended:
            ended = made.poll()
        histories = {completion.id: len(completion.token_ids) + 30 for completion in ended}
    assert len(histories) == 10 and made._growth == engine.turn


def test_prompts_that_begin_alike_count_once():
    for prompt, passed in ((lambda name: [*COMMON, name, name], [*range(30)]), (lambda name: [name, *COMMON], [0])):
        engine = Cached(20 * CHUNK)
        made = WorkingSet(engine, DEAR)
        made.submit(request(name, prompt(name)) for name in range(30))
        made.poll()
        assert engine.submitted == passed


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_the_oldest_episode_goes_on_first(order):
    """Whatever the order in which they come before a step: answers come when they come."""
    engine = Cached(1000, turn=5)
    made = WorkingSet(engine, DEAR)
    for name in order:
        made.submit([request(name, [name] * 600)])
    while not (ended := made.poll()):
        assert engine.submitted == [0]
    made.submit([request(0, [0] * 600, len(ended[0].token_ids) + 300)])  # still a member
    while not made.poll():
        assert engine.submitted == [0, 0]
    made.end(0)
    made.poll()
    assert engine.submitted == [0, 0, 1]


def test_first_turns_after_one_prompt_pass_together():
    """The engine computes the prompt once."""
    engine = Cached(1000)
    made = WorkingSet(engine, DEAR)
    made.submit(request(name, [name // 4] * 250) for name in range(12))
    made.poll()
    assert engine.submitted == [0, 1, 2, 3]


def test_what_the_trainer_waits_for_goes_first():
    engine = Cached(1000, turn=5)
    made = WorkingSet(engine, DEAR)
    made.submit([*(request(name, [name] * 600) for name in range(3)), replace(request(9, [9] * 600), urgent=True)])
    while not made.poll():
        assert engine.submitted == [9]


@pytest.mark.parametrize("resumes", [True, False])
def test_a_resumed_run_decides_as_one_that_goes_on(resumes):
    """What turns are like is known anew after an interruption; of a stream, which is never resumed alike, it stays."""
    engine = Cached(1000, turn=5)
    made = WorkingSet(engine, DEAR, resumes)
    made.submit([request(0, [0] * 10)])
    while not made.poll():
        pass
    made.interrupt()
    made.submit([request(1, [1] * 10)])
    assert made._growth == (0 if resumes else 5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_request_is_lost(data):
    """In any order of turns, ends, aborts and interruptions each request reaches the engine once, or comes back."""
    engine = Cached(data.draw(st.integers(700, 3000)), places=data.draw(st.integers(1, 8)), turn=4)
    made = WorkingSet(engine, data.draw(st.sampled_from([DEAR, FREE])))
    under_way, idle, names = {}, {}, itertools.count()
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["new", "new", "turn", "end", "abort", "poll", "poll", "interrupt"]))
        if what == "new":
            name = next(names)
            under_way[name] = request(name, [name] * data.draw(st.integers(1, 40)))
            made.submit([under_way[name]])
        elif what == "turn" and idle:
            name = data.draw(st.sampled_from(sorted(idle)))
            before, tokens = idle.pop(name)
            under_way[name] = request(name, before.prompt_ids, tokens + data.draw(st.integers(0, 9)))
            made.submit([under_way[name]])
        elif what == "end" and idle:
            name = data.draw(st.sampled_from(sorted(idle)))
            del idle[name]
            made.end(name)
        elif what == "abort" and under_way:
            name = data.draw(st.sampled_from(sorted(under_way)))
            del under_way[name]
            made.abort([name])
            made.end(name)
        elif what == "interrupt":
            stopped = made.interrupt()
            assert [completion.id for completion in stopped] == sorted(under_way)
            for completion in stopped:
                begun = len(under_way[completion.id].begun_ids)
                assert completion.finish_reason == "abort" and begun <= len(completion.token_ids) < begun + 4
            under_way, idle = {}, {}
        elif what == "poll" and under_way:
            for completion in made.poll():
                idle[completion.id] = under_way.pop(completion.id), len(completion.token_ids)
        assert [completion.id for completion in made.unfinished()] == sorted(under_way)
    while under_way:
        for completion in made.poll():
            del under_way[completion.id]
            made.end(completion.id)
