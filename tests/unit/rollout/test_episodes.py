"""Episodes over a scripted engine: response masks, limits, rewards, faults, prompts of a reset."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.pack import pack_completions
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.environments.pool import Answer
from megatron_grpo.rewards.registry import get_rewards
from megatron_grpo.rollout.collect import sample_to_score
from megatron_grpo.rollout.engine import Completion, Request, generate
from megatron_grpo.rollout.episodes import Episodes
from megatron_grpo.utils.errors import GrpoError

END = 9


class Script:
    """An engine that says the given turns, one a step, and notes what it was asked to continue."""

    def __init__(self, turns):
        self.turns, self.running, self.seen = {k: list(v) for k, v in turns.items()}, [], []

    def submit(self, requests):
        self.running += requests

    def poll(self):
        if not self.running:
            return []
        request = self.running.pop(0)
        whole = request.with_begun_in_prompt()
        self.seen.append((request.id, list(whole.prompt_ids), whole.sampling.max_tokens))
        ids = self.turns[request.id].pop(0)[: whole.sampling.max_tokens]
        reason = "stop" if ids[-1] == END else "length"
        made = Completion(request.id, ids, [-1.0] * len(ids), reason, [3] * len(ids))
        return [made.after(request.begun)]

    def abort(self, ids):
        self.running = [request for request in self.running if request.id not in ids]


class Said:
    """A pool that gives prepared answers, each at the second look."""

    def __init__(self, answers):
        self.answers, self.waiting, self.ended = {k: list(v) for k, v in answers.items()}, [], []
        self.of = {}  # the number of the row of each episode

    def begin(self, key, name, row):
        self.of[key] = row["number"]
        self.waiting.append([1, key])

    def step(self, key, turn):
        self.last = turn
        self.waiting.append([1, key])

    def poll(self, wait=0.0):
        ready = [key for left, key in self.waiting if left <= 0]
        self.waiting = [[left - 1, key] for left, key in self.waiting if left > 0]
        return [Answer(key, **self.answers[self.of[key]].pop(0)) for key in ready]

    def end(self, key):
        self.ended.append(self.of[key])


def run(turns, answers, max_tokens=20, **given):
    flags = {"environment": "calculator", "prompt_key": "prompt", "system_prompt": None, "end_token_ids": (END,)}
    flags |= {
        "max_turns": 5,
        "max_prompt_length": 2,
        "max_environment_tokens": 50,
        "on_rewritten_history": "keep",
        "chat_template_kwargs": None,
        "tool_role": "tool",
    }
    tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens=True: " ".join(map(str, ids)),
        apply_chat_template=lambda messages, tools, variables: [100 + len(messages)],
    )
    renderer = SimpleNamespace(
        after_turn=lambda before, turn, new, last, tools, variables: [70, len(before), 71],
        rewritten=lambda so_far, messages, *_: (None if len(so_far) < 8 else [80, len(messages), 81], ()),
    )
    engine, pool = Script(turns), Said(answers)
    episodes = Episodes(engine, pool, renderer, None, tokenizer, SimpleNamespace(**flags | given))
    requests = [
        Request(key, [1, 2], Sampling(max_tokens, log_probs=True), row={"prompt": "p", "number": key}) for key in turns
    ]
    done = {completion.id: completion for completion in generate(episodes, requests)}
    assert done.keys() == turns.keys() and sorted(pool.ended) == sorted(turns)
    return done, engine.seen, episodes


MESSAGE = [{"role": "user", "content": "go on"}]
RESET, MORE, DONE = {}, {"messages": MESSAGE, "reward": 0.5}, {"done": True, "reward": 1.0}


def test_three_turns():
    done, seen, _ = run({4: [[5, END], [6, END], [7, 8, END]]}, {4: [RESET, MORE, MORE, DONE]})
    completion = done[4]
    assert completion.token_ids == [5, END, 70, 1, 71, 6, END, 70, 3, 71, 7, 8, END]
    assert completion.response_mask == [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert [math.isnan(x) for x in completion.log_probs] == [m == 0 for m in completion.response_mask]
    assert completion.turns == 3 and completion.environment_reward == 2.0 and completion.finish_reason == "stop"
    assert [m["role"] for m in completion.messages] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert completion.turn_rewards.tolist()[:3] == [0.5, 0.5, 1.0] and np.isnan(completion.turn_rewards[3:]).all()
    # Each turn continues from the very tokens so far; the limit counts sampled tokens only.
    assert seen == [(4, [1, 2, *completion.token_ids[:n]], left) for n, left in ((0, 20), (5, 18), (10, 16))]


def test_rewards_see_which_tokens_were_sampled():
    """22 sampled tokens of 64 allowed are no reason for a length penalty, however much the environment said."""
    turns, answers = {4: [[*range(9), END], [6, END], [*range(9), END]]}, {4: [RESET, MORE, MORE, DONE]}
    prompt = SimpleNamespace(row={}, source="")
    (soft_overlong,) = get_rewards(["soft_overlong"], {"max_completion_length": 27, "soft_cache_length": 5})
    for history in ("keep", "split"):
        done, _, episodes = run(turns, answers, max_tokens=27, on_rewritten_history=history)
        sample = sample_to_score(prompt, "", done[4], episodes._tokenizer)
        assert len(sample.token_ids) == 28 and sample.num_sampled == 22 and soft_overlong(sample) == 0
        sampled = [token for token, mask in zip(sample.token_ids, sample.response_mask, strict=True) if mask]
        assert sampled == [*range(9), END, 6, END, *range(9), END]


def test_the_batch_of_episodes():
    done, _, _ = run({0: [[5, END], [6, END]], 1: [[5, END]]}, {0: [RESET, MORE, DONE], 1: [RESET, {"error": "lost"}]})
    completions = [done[0], done[1]]
    assert completions[1].finish_reason == "failed"
    batch = RolloutBatch.from_completions(
        [[1, 2]] * 2,
        [c.token_ids for c in completions],
        [c.log_probs for c in completions],
        [c.weight_versions for c in completions],
        [0, 0],
        [0, 0],
        [0, 1],
        [FinishReason[c.finish_reason.upper()] for c in completions],
        response_masks=[c.response_mask for c in completions],
        turns=[c.turns for c in completions],
    )
    assert batch.response_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert batch.response_lengths.tolist() == [4, 0] and batch.turns.tolist() == [2, 1]
    assert np.isnan(batch.rollout_log_probs[batch.response_mask == 0][:5]).all()


def test_limits():
    turns = {0: [[5, END]] * 9, 1: [[5] * 30], 2: [[5, 6, 7, 8, 5, END]], 3: [[5, 6, END], [7, 8, 5, END]]}
    answers = {key: [RESET, *[MORE] * 9] for key in turns}
    done, _, _ = run(turns, answers, max_tokens=6, max_turns=3, max_environment_tokens=4)
    assert {key: c.finish_reason for key, c in done.items()} == dict.fromkeys(turns, "length")
    assert done[0].token_ids == [5, END, 70, 1, 71, 5, END], "the second answer does not fit into 4 tokens"
    assert done[1].token_ids == [5] * 6 and done[1].turns == 1
    assert done[3].token_ids == [5, 6, END, 70, 1, 71, 7, 8, 5] and done[3].num_sampled == 6
    done, _, _ = run({0: [[5, END]] * 9}, {0: [RESET, *[MORE] * 9]}, max_turns=2)
    assert done[0].turns == 2 and done[0].environment_reward == 1.0
    # The answer that does not fit is left out, and the last turn is there once.
    assert [m["role"] for m in done[0].messages] == ["user", "assistant", "user", "assistant"]


def test_turns_that_follow_equal_answers_are_in_one_state():
    """The double of the renderer shows the number of messages before the turn; a reset's messages are no answer."""
    turns = {0: [[5, END], [6, END], [7, END]], 1: [[8, END], [4, END]], 2: [[5, END]]}
    answers = {0: [RESET, MORE, MORE, DONE], 1: [RESET, MORE, DONE], 2: [RESET, {"error": "lost"}]}
    done, _, _ = run(turns, answers)
    first, second, failed = (done[number].turn_states for number in range(3))
    assert first[0] == second[0] == failed[0] == 0 and first[1] == second[1] != 0
    assert first[2] not in (0, first[1]) and first[3:].tolist() == [0, 0] == failed[1:3].tolist()


def test_messages_of_a_reset_are_the_prompts():
    done, seen, _ = run({0: [[5, END]]}, {0: [{"messages": MESSAGE}, DONE]})
    assert done[0].prompt_ids == [102] and seen[0][1] == [102] and done[0].response_mask is None


def test_others_generate_while_one_waits():
    _, seen, episodes = run({0: [[5, END]] * 2, 1: [[6, END]] * 2}, {0: [RESET, MORE, DONE], 1: [RESET, MORE, DONE]})
    assert len(seen) == 4 and episodes.failures() == []
    _, _, episodes = run({0: [[5, END]]}, {0: [{"error": "no connection\ntrace"}]})
    assert ["failed in 1 episode: no connection" in line for line in episodes.failures()] == [True]


def test_changed_answers_to_repeated_turns_are_named_once():
    turns, more = {number: [[5, END]] * 2 for number in range(3)}, MORE | {"changed": True}
    done, _, episodes = run(turns, {0: [RESET, more, DONE], 1: [RESET, MORE, DONE], 2: [RESET, more, DONE]})
    lines = episodes.failures()
    assert len(lines) == 1 and "otherwise than the first time in 2 episodes" in lines[0]
    assert episodes.failures() == [] and {c.environment_reward for c in done.values()} == {1.5}


def test_a_rewritten_history_begins_another_sample():
    """The second answer is appended, the third one follows a prompt of its own; the limits are those of the episode."""
    turns, answers = {4: [[5, END], [6, END], [7, 8, END], [5, END]]}, {4: [RESET, MORE, MORE, MORE, DONE]}
    done, seen, _ = run(turns, answers, on_rewritten_history="split")
    completion = done[4]
    assert completion.token_ids == [5, END, 70, 1, 71, 6, END, 80, 5, 81, 7, 8, END, 70, 5, 71, 5, END]
    assert completion.response_mask == [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert completion.sample_starts == [7] and completion.prompt_ids == [1, 2]
    assert completion.turns == 4 and completion.environment_reward == 2.5 and len(completion.messages) == 8
    first, second = [1, 2, 5, END, 70, 1, 71], [80, 5, 81]
    assert [ids for _, ids, _ in seen] == [[1, 2], first, second, [*second, 7, 8, END, 70, 5, 71]]
    assert [left for *_, left in seen] == [20, 18, 16, 13]

    batch = RolloutBatch.from_completions(
        [[1, 2]], [completion.token_ids], [completion.log_probs], [completion.weight_versions], [0], [0], [0],
        [FinishReason.STOP], response_masks=[completion.response_mask], sample_starts=[completion.sample_starts],
    )  # fmt: skip
    pack = pack_completions(batch, [0], pad_multiple=4)
    assert pack.cu_seqlens.tolist() == [0, 9, 20] and pack.position_ids.tolist() == [*range(9), *range(11)]
    assert pack.completion.tolist() == [0] * 9 and batch.response_lengths.tolist() == [9]

    done, _, _ = run(turns, answers, on_rewritten_history="split", max_environment_tokens=5)
    assert done[4].finish_reason == "length" and done[4].sample_starts == []


def test_a_rewritten_history_is_refused():
    turns, answers = {4: [[5, END], [6, END]]}, {4: [RESET, MORE, MORE]}
    with pytest.raises(GrpoError, match=r"turn 2 .* sampled was '1 2 5 9 70 1 71 6 9', and it renders '80 5 81'"):
        run(turns, answers, on_rewritten_history="refuse")
