"""Agent programs whose calls are interrupted anywhere: the program and its samples are those of an undisturbed run."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_interrupted_episodes import END, Stepper, next_token

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.environments.agent import URL
from megatron_grpo.environments.pool import Answer
from megatron_grpo.rollout.agents import agents as module
from megatron_grpo.rollout.agents.agents import Agents
from megatron_grpo.rollout.agents.endpoint import Call
from megatron_grpo.rollout.engine import Request, generate

LONGEST = 4  # tokens of an answer


def answered(prompt):
    """Return the answer to a prompt, by a loop of its own."""
    ids = []
    while len(ids) < LONGEST and (not ids or ids[-1] != END):
        ids.append(next_token([*prompt, *ids]))
    return ids


def said(ids):
    """Return the text of an answer, as a program reads it."""
    return " ".join(str(token) for token in (ids[:-1] if ids[-1] == END else ids))


def talk(number):
    """A program: a call, then two side by side that continue it; its reward is the number of answers."""
    messages = [{"role": "user", "content": f"{number} 11"}]
    (first,) = yield [messages]
    messages = [*messages, {"role": "assistant", "content": first}]
    answers = yield [[*messages, {"role": "user", "content": f"21 {place}"}] for place in (30, 40)]
    return 1.0 + len(answers)


def check_samples(completion, number):
    """The samples are those of `talk`: the call that is answered first has what both share, which is trained once."""
    edges = [0, *completion.sample_starts, len(completion.token_ids)]
    prompt, first, left = [number, 11], answered([number, 11]), {30, 40}
    for part, (begin, end) in enumerate(itertools.pairwise(edges)):
        ids, mask = completion.token_ids[begin:end], completion.response_mask[begin:end]
        if part:  # a further sample begins with its prompt
            assert (ids[:2], mask[:2]) == (prompt, [0, 0])
            ids, mask = ids[2:], mask[2:]
        place = ids[len(first) + 1]
        second = answered([*prompt, *first, 21, place])
        assert ids == [*first, 21, place, *second]
        assert mask == [int(part == 0)] * len(first) + [0, 0] + [1] * len(second)
        left.remove(place)
    assert not left and list(completion.prompt_ids) == prompt


class Programs:
    """Pool and endpoint of programs that run beside the rollout: what they do takes a drawn number of looks."""

    def __init__(self, delay):
        self.delay, self.coming, self.running, self.begun, self.sessions = delay, [], {}, [], 0

    # ---- the pool

    def begin(self, key, name, row):
        self.begun.append(row["number"])
        self.running[key] = [row[URL], talk(row["number"]), None, {}]  # with the answers of the calls under way
        self.later("pool", Answer(key))

    def step(self, key, turn):
        self.go_on(key, None)

    def poll(self, wait=0.0):
        return [answer for answer in self.arrived("pool") if answer.key in self.running]

    def end(self, key):
        del self.running[key]

    def go_on(self, key, answers):
        url, program, _, _ = self.running[key]
        try:
            asked = program.send(answers)
        except StopIteration as end:
            self.later("pool", Answer(key, reward=end.value, done=True))
            return
        self.running[key][2:] = [len(asked), {}]
        for place, messages in enumerate(asked):
            body = {"messages": messages, "max_tokens": LONGEST, "place": [key, place]}
            self.later("calls", Call(url, "run", body, True, SimpleNamespace(cancelled=lambda: False)))

    # ---- the endpoint

    def open(self):
        self.sessions += 1
        return str(self.sessions), str(self.sessions)

    def close(self, session):
        pass

    def calls(self, wait=0.0):
        return self.arrived("calls")

    def answer(self, call, choice, usage):
        key, place = call.body["place"]
        _, _, count, answers = self.running[key]
        answers[place] = choice["message"]["content"]
        if len(answers) == count:
            self.go_on(key, [answers[i] for i in range(count)])

    def refuse(self, call, message, code="", status=400):
        raise AssertionError(message)

    # ---- time

    def later(self, what, news):
        self.coming.append([self.delay(), what, news])

    def arrived(self, what):
        for entry in self.coming:
            entry[0] -= entry[1] == what
        found = [entry for entry in self.coming if entry[1] == what and entry[0] < 0]
        self.coming = [entry for entry in self.coming if entry not in found]
        return [news for _, _, news in found]


def agents_of(programs):
    flags = {"environment": "agent:x", "end_token_ids": (END,), "on_rewritten_history": "keep", "tool_role": "tool"}
    flags |= {"max_prompt_length": 20, "max_environment_tokens": 40, "chat_template_kwargs": None, "vocab_size": 100}

    def ids_of(messages):
        return [int(token) for message in messages for token in message["content"].split()]

    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens=True: " ".join(str(token) for token in ids))
    renderer = SimpleNamespace(
        whole=lambda messages, tools, variables: ids_of(messages),
        after_turn=lambda before, turn, new, last, tools, variables: ids_of(new),
    )
    return Agents(Stepper(), programs, renderer, None, tokenizer, SimpleNamespace(**flags))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    steps=st.lists(st.integers(1, 6), max_size=8),
    evaluations=st.sets(st.integers(0, 7)),
    seeded=st.booleans(),
)
def test_any_interleaving(seed, steps, evaluations, seeded):
    rng = np.random.default_rng(seed)
    programs = Programs(lambda: int(rng.integers(0, 4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Endpoint", lambda: programs)
        agents = agents_of(programs)
    sampling = Sampling(40, log_probs=True)
    requests = [
        Request(n, [1], sampling, seed=1000 + n if seeded else None, row={"number": 50 + (seed + n) % 40})
        for n in range(4)
    ]
    done = {}
    for rollout in range(len(steps) + 1):
        agents.submit([r for r in requests if r.id not in done])
        left = steps[rollout] if rollout < len(steps) else 10**6
        while len(done) < 4 and left:
            done |= {completion.id: completion for completion in agents.poll()}
            left -= 1
        if len(done) == 4:
            break
        unfinished = [r.id for r in requests if r.id not in done]
        assert [completion.id for completion in agents.unfinished()] == unfinished
        stopped = agents.interrupt()
        assert [(c.id, c.finish_reason) for c in stopped] == [(number, "abort") for number in unfinished]
        if rollout in evaluations:  # its requests have the same ids, and rows of their own; one has no program
            others = [Request(n, [1], sampling, seed=n, row={"number": 90 + n}) for n in range(3)]
            found = {completion.id: completion for completion in generate(agents, [*others, Request(3, [5], sampling)])}
            for n in range(3):
                check_samples(found[n], 90 + n)
            assert len(found[3].token_ids) == 40 or found[3].token_ids[-1] == END
    for request in requests:
        completion, number = done[request.id], request.row["number"]
        check_samples(completion, number)
        assert (completion.finish_reason, completion.environment_reward, completion.turns) == ("stop", 3.0, 3)
        assert programs.begun.count(number) == 1  # no program runs twice
    assert not (programs.running or agents._paused or agents._asked or agents._calls or agents._sessions)
    ours = [(key, s) for key, s in agents._engine.seeds.items() if s is not None and s >= 4]
    by_start = {(number, tokens): s for (number, tokens, _), s in ours}
    assert len(set(by_start.values())) == len(by_start)  # each start of sampling has a seed of its own
