"""Groups as arrays: what an episode has besides its tokens comes back."""

import math
from dataclasses import replace

import numpy as np

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.rollout.engine import Completion
from megatron_grpo.rollout.unfinished import Group, from_arrays, to_arrays, with_completion

PROMPT = Prompt(7, [1, 2], {}, "rows.jsonl:8")


def test_episodes_come_back():
    messages = [{"role": "user", "content": "zwei mal drei? \u00e9\n"}, {"role": "assistant", "content": "6"}]
    whole = Completion(
        4, [5, 9, 70, 6, 9], [-0.5, -1.0, math.nan, -0.25, -2.0], "stop", [3, 3, 3, 4, 4],
        response_mask=[1, 1, 0, 1, 1], prompt_ids=[1, 2, 3], turns=2, environment_reward=0.1, messages=messages,
        sample_starts=[3],
    )  # fmt: skip
    one = Completion(5, [8], [-1.5], "length", [4], turns=1, messages=[], sample_starts=[])
    failed = Completion(6, [], None, "failed", [])
    group = Group(PROMPT, 2, (whole, one, failed, None), np.array([[1.0], [0.5], [np.nan], [0.0]], np.float32))
    plain = Group(PROMPT, 2, tuple(Completion(8 + i, [i], [-1.0], "stop", [0]) for i in range(4)))
    found = from_arrays(to_arrays({1: group, 2: plain}), lambda row, ids: PROMPT)
    turns = np.array([0.5, np.nan], np.float32), np.array([0, -(2**62)])
    of_turns = replace(group, completions=(replace(one, turn_rewards=turns[0], turn_states=turns[1]), failed))
    kept = from_arrays(to_arrays({3: of_turns}), lambda row, ids: PROMPT)[3].completions[0]
    assert np.array_equal(kept.turn_rewards, turns[0], equal_nan=True) and np.array_equal(kept.turn_states, turns[1])
    back = found[1].completions
    assert back[1:] == group.completions[1:] and np.array_equal(found[1].rewards, group.rewards, equal_nan=True)
    assert back[0].log_probs[:2] == whole.log_probs[:2] and math.isnan(back[0].log_probs[2])
    assert replace(back[0], log_probs=None) == replace(whole, log_probs=None)
    assert found[2].completions == plain.completions


def test_a_failed_episode_without_a_token_is_finished():
    group = with_completion(Group(PROMPT, 0, (None,)), 0, Completion(0, [], None, "failed", []))
    assert group.complete
    assert not with_completion(group, 0, Completion(0, [], None, "abort", [])).complete
