"""Episodes that are interrupted anywhere end as those that are not, whatever the order of answers and interruptions."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.environments.pool import Answer
from megatron_grpo.rollout.collect import to_batch
from megatron_grpo.rollout.engine import Completion, Request, generate
from megatron_grpo.rollout.episodes import Episodes
from megatron_grpo.rollout.unfinished import Group, from_arrays, to_arrays

END, TURNS, MOST = 9, 3, 12


def next_token(ids):
    """A token that follows from all before it; three in ten end a turn."""
    return int(np.random.default_rng(ids).choice([1, 2, 3, 4, 5, 6, 7, END, END, END]))


def answer_to(turn_ids):
    return [70, sum(turn_ids) % 50, 71]


def expected(prompt):
    """Return (tokens, response mask, finish reason) of the episode, by a loop of its own."""
    ids, mask = [], []
    for number in range(1, TURNS + 1):
        turn = []
        while sum(mask) + len(turn) < MOST and (not turn or turn[-1] != END):
            turn.append(next_token([*prompt, *ids, *turn]))
        ids, mask = [*ids, *turn], [*mask, *[1] * len(turn)]
        if number == TURNS or sum(mask) == MOST:
            reason = "stop" if turn[-1] == END else "length"
            return ids, mask, reason if number == TURNS else "length"
        ids, mask = [*ids, *answer_to(turn)], [*mask, 0, 0, 0]


class Stepper:
    """An engine of one token a step, under weights whose version counts the interruptions."""

    def __init__(self):
        self.running, self.version, self.seeds = {}, 0, {}

    def submit(self, requests):
        for request in requests:
            assert request.id not in self.running
            self.running[request.id] = [request, []]
            self.seeds[request.id, len(request.begun_ids), self.version] = request.seed

    def poll(self):
        done = []
        for number, (request, ids) in list(self.running.items()):
            ids.append(next_token([*request.prompt_ids, *request.begun_ids, *ids]))
            sampled = len(ids) + (request.begun.num_sampled if request.begun else 0)
            if ids[-1] == END or sampled == request.sampling.max_tokens:
                done.append(self.stop(number, "stop" if ids[-1] == END else "length"))
        return done

    def stop(self, number, reason):
        request, ids = self.running.pop(number)
        made = Completion(number, ids, [-1.0] * len(ids), reason, [self.version] * len(ids))
        return made.after(request.begun)

    def interrupt(self):
        stopped = [self.stop(number, "abort") for number in sorted(self.running)]
        self.version += 1
        return stopped


class Delayed:
    """A pool whose answers come after a number of looks that ``delay`` draws."""

    def __init__(self, delay):
        self.delay, self.waiting, self.open, self.begun, self.states = delay, [], {}, [], {}
        self.differing = 0

    def begin(self, key, name, row):
        assert key not in self.open
        self.open[key] = row["number"]
        self.begun.append(row["number"])
        self.states[key] = {"name": name, "newest": {"messages": []}}
        self.waiting.append([self.delay(), Answer(key)])

    def step(self, key, turn):
        assert key in self.open
        done = turn.number == TURNS
        text = [] if done else [{"role": "user", "content": " ".join(map(str, answer_to(turn.token_ids)))}]
        answer = {"messages": text, "reward": 1.0, "done": done}
        self.states[key] = self.states[key] | {"newest": answer}
        self.waiting.append([self.delay(), Answer(key, **answer)])

    def state(self, key):
        return self.states[key]

    def resume(self, key, row, state):
        self.open[key], self.states[key] = row["number"], state
        answer = {"differs": True} if self.delay() == 0 else state["newest"]
        self.differing += "differs" in answer
        self.waiting.append([self.delay(), Answer(key, **answer)])

    def poll(self, wait=0.0):
        for entry in self.waiting:
            entry[0] -= 1
        ready = [answer for left, answer in self.waiting if left < 0]
        self.waiting = [entry for entry in self.waiting if entry[0] >= 0]
        return [answer for answer in ready if answer.key in self.open]

    def end(self, key):
        del self.open[key]


def through_arrays(completions):
    """Return the completions of a checkpoint's file."""
    prompt = Prompt(0, [1], {}, "rows.jsonl:1")
    groups = {c.id: Group(prompt, 0, (c,)) for c in completions}
    return [group.completions[0] for group in from_arrays(to_arrays(groups), lambda row, ids: prompt).values()]


def episodes_of(pool, environment, engine=None, max_turns=TURNS):
    flags = {"environment": environment, "prompt_key": "prompt", "system_prompt": None, "end_token_ids": (END,)}
    flags |= {
        "max_turns": max_turns,
        "max_environment_tokens": 50,
        "max_prompt_length": 50,
        "on_rewritten_history": "keep",
        "tool_role": "tool",
    }
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens=True: " ".join(map(str, ids)))
    renderer = SimpleNamespace(
        after_turn=lambda before, turn, new, last, tools, variables: [int(t) for t in new[0]["content"].split()]
    )
    args = SimpleNamespace(**flags, chat_template_kwargs=None)
    return Episodes(engine or Stepper(), pool, renderer, None, tokenizer, args)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_resume_has_another_limit_of_turns(limit):
    """An episode that has more turns ends with the one it is in; its arrays go into a batch with those of others."""
    number = next(n for n in range(99) if sum(expected([0, n])[1]) < MOST)  # it has all turns
    request = Request(number, [0, number], Sampling(MOST, log_probs=True), row={"prompt": "p", "number": number})
    pool = Delayed(lambda: 1)
    episodes = episodes_of(pool, "python")
    episodes.submit([request])
    while not (episodes._episodes[number].turns == 2 and episodes._generating):
        episodes.poll()
    (begun,) = through_arrays(episodes.interrupt())
    pool = Delayed(lambda: 1)
    (resumed,) = generate(episodes_of(pool, "python", max_turns=limit), [replace(request, begun=begun)])
    ids, mask, reason = expected([0, number])
    assert (resumed.token_ids, resumed.response_mask, resumed.finish_reason) == (ids, mask, reason)
    assert resumed.turns == TURNS and not pool.open
    short = replace(resumed, id=0, turn_rewards=np.ones(1, np.float32), turn_states=np.full(1, 7))
    prompts, members = [SimpleNamespace(ids=[0], id=0)], {n: SimpleNamespace(group=0, place=n, size=2) for n in (0, 1)}
    batch = to_batch(prompts, [short, replace(resumed, id=1)], members, [0], 0)
    more = max(limit, TURNS) - 1
    assert batch.turn_states[0].tolist() == [7, *[0] * more]
    np.testing.assert_array_equal(batch.turn_rewards[0], [1, *[math.nan] * more])
    np.testing.assert_array_equal(batch.turn_rewards[1], resumed.turn_rewards)
    assert resumed.turn_rewards[:TURNS].tolist() == [1, 1, 1]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    steps=st.lists(st.integers(1, 6), max_size=8),
    evaluations=st.sets(st.integers(0, 7)),
    resumes=st.sets(st.integers(0, 7), max_size=3),
    environment=st.sampled_from(["countdown_game", "python"]),  # one answers at once, the other one when it can
)
def test_any_interleaving(seed, steps, evaluations, resumes, environment):
    rng = np.random.default_rng(seed)
    pool = Delayed(lambda: int(rng.integers(0, 5)))
    episodes = episodes_of(pool, environment)
    sampling = Sampling(MOST, log_probs=True)
    requests = [Request(n, [seed % 97, n], sampling, seed=1000 + n, row={"prompt": "p", "number": n}) for n in range(4)]
    begun, done = {}, {}
    for rollout in range(len(steps) + 1):
        episodes.submit([replace(r, begun=begun.get(r.id)) for r in requests if r.id not in done])
        left = steps[rollout] if rollout < len(steps) else 10**6
        while len(done) < 4 and left:
            done |= {completion.id: completion for completion in episodes.poll()}
            left -= 1
        if len(done) == 4:
            break
        for completion in episodes.interrupt():
            assert completion.finish_reason == "abort"
            begun[completion.id] = completion
        if rollout in resumes:  # by another process, from what a checkpoint holds
            begun = {c.id: c for c in through_arrays(begun.values()) if c is not None}
            requests = [replace(r, row=dict(r.row)) for r in requests]
            asked = pool.begun
            pool = Delayed(pool.delay)
            pool.begun = asked
            episodes = episodes_of(pool, environment, episodes._engine)
        if rollout in evaluations:  # its requests have the same ids, and rows of their own
            others = [Request(n, [200, n], sampling, seed=n, row={"prompt": "q", "number": 50 + n}) for n in range(4)]
            found = {completion.id: completion for completion in generate(episodes, others)}
            assert {n: c.token_ids for n, c in found.items()} == {n: expected([200, n])[0] for n in range(4)}
    for number, completion in done.items():
        ids, mask, reason = expected([seed % 97, number])
        assert (completion.token_ids, completion.response_mask or [1] * len(ids)) == (ids, mask)
        assert completion.finish_reason == reason and completion.environment_reward == completion.turns
        versions = completion.weight_versions
        assert len(versions) == len(ids) and sorted(versions) == list(versions)
        assert resumes or pool.begun.count(number) == 1  # nothing is asked twice
    assert not pool.open and not episodes._paused
    ours = {key: s for key, s in episodes._engine.seeds.items() if s >= 4}
    by_start = {(number, tokens): s for (number, tokens, _), s in ours.items()}
    assert resumes or len(set(by_start.values())) == len(by_start)  # each start of sampling has a seed of its own
