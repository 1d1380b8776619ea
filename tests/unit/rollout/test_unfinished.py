"""Groups as arrays: what an episode has besides its tokens comes back."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from selection_engine import prompts

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.engine import Completion, Request
from megatron_grpo.rollout.unfinished import Group, PartialRollouts, from_arrays, to_arrays, with_completion
from megatron_grpo.utils.errors import GrpoError

PROMPT = Prompt(7, [1, 2], {}, "rows.jsonl:8")


def test_episodes_come_back():
    messages = [{"role": "user", "content": "zwei mal drei? \u00e9\n"}, {"role": "assistant", "content": "6"}]
    whole = Completion(
        4, [5, 9, 70, 6, 9], [-0.5, -1.0, math.nan, -0.25, -2.0], "stop", [3, 3, 3, 4, 4],
        response_mask=[1, 1, 0, 1, 1], prompt_ids=[1, 2, 3], turns=2, malformed_calls=3, environment_reward=0.1,
        messages=messages, sample_starts=[3],
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
    wider = replace(whole, turn_rewards=np.array([0, 1, 2], np.float32), turn_states=np.array([0, 4, 5]))
    of_both = replace(group, completions=(wider, *of_turns.completions))  # before and after a change of --max-turns
    both = from_arrays(to_arrays({3: of_both}), lambda row, ids: PROMPT)[3].completions
    assert [c.turn_states.tolist() for c in both] == [[0, 4, 5], [0, -(2**62), 0], [0, 0, 0]]
    expected = [[0, 1, 2], [0.5, math.nan, math.nan], [math.nan] * 3]
    np.testing.assert_array_equal([c.turn_rewards for c in both], expected)
    back = found[1].completions
    assert back[1:] == group.completions[1:] and np.array_equal(found[1].rewards, group.rewards, equal_nan=True)
    assert back[0].log_probs[:2] == whole.log_probs[:2] and math.isnan(back[0].log_probs[2])
    assert replace(back[0], log_probs=None) == replace(whole, log_probs=None)
    assert found[2].completions == plain.completions


def test_an_interrupted_episode_keeps_its_state():
    state = {"turns": 1, "environment": {"snapshot": {"at": [0, 1]}, "name": "game"}}
    begun = Completion(0, [5, 70], [-0.5, math.nan], "abort", [3, 3], response_mask=[1, 0], episode_state=state)
    plain = Completion(1, [6], [-1.0], "abort", [3])
    found = from_arrays(to_arrays({0: Group(PROMPT, 2, (begun, plain))}), lambda row, ids: PROMPT)[0].completions
    assert found[0].episode_state == state and found[1].episode_state is None
    newer = ("episode_state", "malformed_calls")  # than checkpoints of earlier versions
    arrays = to_arrays({0: Group(PROMPT, 2, (begun, plain))})
    earlier = {k: v for k, v in arrays.items() if not k.startswith(newer)}
    assert from_arrays(earlier, lambda row, ids: PROMPT)[0].completions[0].episode_state is None


def test_samples_are_joined_and_separated():
    kept = np.arange(10, dtype=np.int32).reshape(5, 2)
    first = Completion(
        4, [5, 70, 6, 7, 9], [-0.5, -2.0, -0.25, -1.0, -3.0], "abort", [3, 3, 4, 4, 4], kept_token_ids=kept,
        response_mask=[1, 0, 0, 1, 1], prompt_ids=[1, 2],
    )  # fmt: skip
    second = Completion(4, [8], [-4.0], "abort", [5], kept_token_ids=kept[:1], prompt_ids=[1, 2, 5, 70])
    begun = Completion(4, [], [], "abort", [], kept_token_ids=kept[:0], prompt_ids=[1, 2, 5])
    for samples in ([first], [first, second], [second, first, begun]):
        found = Completion.joined(samples).separated()
        assert [replace(c, kept_token_ids=None) for c in found] == [replace(c, kept_token_ids=None) for c in samples]
        assert all(np.array_equal(a.kept_token_ids, b.kept_token_ids) for a, b in zip(found, samples, strict=True))


@pytest.mark.parametrize("number", [1, 3])
def test_a_token_without_a_log_probability_stays_unknown(number):
    """With --mismatch-sample-rate below 1, a rollout that asks for none begins what another one goes on with."""
    begun = Completion(0, [5, 6], None, "abort", [3, 3])
    whole = Completion(0, [7] * number, [-0.5] * number, "stop", [4] * number).after(begun)
    np.testing.assert_array_equal(whole.log_probs, [np.nan] * 2 + [-0.5] * number)
    assert whole.token_ids == [5, 6] + [7] * number and whole.weight_versions == [3, 3] + [4] * number


def test_a_failed_episode_without_a_token_is_finished():
    group = with_completion(Group(PROMPT, 0, (None,)), 0, Completion(0, [], None, "failed", []))
    assert group.complete
    assert not with_completion(group, 0, Completion(0, [], None, "abort", [])).complete


class Rows:
    """The prompts by number."""

    def __getitem__(self, number):
        return prompts(1, first=number)[0]


@pytest.mark.parametrize("seed", range(8))
def test_other_replicas_continue_the_groups_of_a_checkpoint(tmp_path, seed):
    """Every batch is whole, with no group too old; each group is trained on once, with the tokens that it has."""
    rng = np.random.default_rng(seed)
    batch, staleness, batches = int(rng.integers(2, 9)), int(rng.integers(1, 4)), 8
    taken, position = {}, None
    for version in range(batches):
        replicas = int(rng.integers(1, batch + 1))
        for replica in range(replicas):
            engine = SimpleNamespace(replica=replica, num_replicas=replicas)
            own = PartialRollouts(engine, batch, 1, staleness)
            if position is not None:
                own.load(tmp_path / f"{version}", position, Rows())
            new = own.prompts_to_draw()
            groups = own.with_new(prompts(new, first=own.state.started))
            while (found := own.to_take(groups)) is None:
                number = int(rng.choice([number for number, group in groups.items() if not group.complete]))
                begun = groups[number].completions[0]
                ids = [*(begun.token_ids if begun else ()), number]
                reason = "stop" if rng.random() < 0.3 else "abort"
                completion = Completion(number, ids, [-1.0] * len(ids), reason, [version] * len(ids))
                groups[number] = with_completion(groups[number], 0, completion)
            assert len(found) == len(range(batch)[replica::replicas])
            for number in found:
                group = groups[number]
                assert number not in taken and group.prompt.id == number and version - group.birth <= staleness
                assert set(group.completions[0].token_ids) == {number}
                taken[number] = version
            own.take(groups, found, new)
            own.save(tmp_path / f"{version + 1}", own.state)
        position = own.position(own.state)
    assert len(taken) == batch * batches and position["started"] == batch * (batches + staleness)
    assert len(set(taken) | set(range(batch * (batches - staleness)))) == len(taken)


def test_a_resume_with_less_room_than_a_completion_has_is_refused():
    begun = Completion(0, [5, 6, 7], None, "abort", [1, 1, 1])
    request = Request(0, [1, 2], Sampling(max_tokens=4), begun=begun).with_begun_in_prompt()
    assert (request.prompt_ids, request.sampling.max_tokens) == ([1, 2, 5, 6, 7], 1)
    with pytest.raises(GrpoError, match=r"has 3 tokens, and may have 2 now \(--max-completion-length"):
        replace(request, prompt_ids=[1, 2], sampling=Sampling(max_tokens=2)).with_begun_in_prompt()
