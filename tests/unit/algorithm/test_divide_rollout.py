"""The updates of a rollout: which completions each of them has, with the shuffle and without."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.registry import Loss
from megatron_grpo.algorithm.updates import divide_rollout
from megatron_grpo.data.schedule import schedule
from megatron_grpo.rollout.plan import rollout_seed

SPREAD = [name for name, loss in LOSSES.entries.items() if not loss.whole_groups]
WHOLE = [name for name, loss in LOSSES.entries.items() if loss.whole_groups]
SEEDS = st.integers(0, 2**31)


def test_which_losses_need_whole_groups():
    """real compares the completions of a prompt, bnpo averages over blocks; all others are sums over completions."""
    assert WHOLE == ["bnpo", "real"]
    assert not {"grpo", "dapo", "dr_grpo", "gspo", "cispo"} & set(WHOLE)


def test_a_loss_of_a_plugin_that_reads_the_groups_needs_them_whole():
    def ranks(scores, group_ids):
        return scores

    def loss(advantages):
        return advantages

    assert Loss("mine", loss, update_advantages=ranks).whole_groups
    assert not Loss("mine", loss).whole_groups


@st.composite
def rollouts(draw):
    """(group_ids in the order of a rollout, number of updates)."""
    steps, size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    groups = draw(st.lists(st.integers(0, 999), min_size=steps, max_size=steps * 4, unique=True))
    groups = groups[: len(groups) // steps * steps]
    return np.repeat(np.array(groups, np.int64), size), steps


@given(rollouts(), st.booleans(), st.sampled_from(list(LOSSES.entries)), SEEDS)
def test_every_completion_is_in_one_update_of_equal_size(rollout, shuffle, name, seed):
    group_ids, steps = rollout
    updates = divide_rollout(group_ids, steps, shuffle, LOSSES.get(name), seed)
    assert [len(update) for update in updates] == [len(group_ids) // steps] * steps
    assert sorted(np.concatenate(updates).tolist()) == list(range(len(group_ids)))
    if not shuffle:
        assert np.concatenate(updates).tolist() == list(range(len(group_ids)))


@given(rollouts(), st.sampled_from(WHOLE), SEEDS)
def test_groups_stay_whole_for_the_losses_that_need_them(rollout, name, seed):
    """The groups of an update come one after the other, each with its completions in order."""
    group_ids, steps = rollout
    size = len(group_ids) // len(np.unique(group_ids))
    for update in divide_rollout(group_ids, steps, True, LOSSES.get(name), seed):
        for first in range(0, len(update), size):
            members = update[first : first + size]
            assert members.tolist() == np.flatnonzero(group_ids == group_ids[members[0]]).tolist()


@given(st.sampled_from(list(LOSSES.entries)), st.integers(0, 2**31), st.integers(1, 10**6))
@settings(max_examples=50)
def test_the_same_rollout_has_the_same_updates_and_another_has_others(name, seed, rollout):
    """Whatever was drawn from numpy before: on another rank, or in the process that resumes."""
    group_ids, loss = np.repeat(np.arange(64), 2), LOSSES.get(name)

    def order(number):
        return np.concatenate(divide_rollout(group_ids, 4, True, loss, rollout_seed(seed, number))).tolist()

    first = order(rollout)
    np.random.random(3)
    assert order(rollout) == first
    assert first not in (order(rollout + 1), list(range(128)))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_an_update_has_the_same_completions_on_any_number_of_ranks(dp_size):
    group_ids, lengths = np.repeat(np.arange(16), 4), np.random.default_rng(0).integers(1, 50, 64)
    for update in divide_rollout(group_ids, 2, True, LOSSES.get("grpo"), 7):
        ranks = schedule(lengths[update], dp_size, micro_batch_size=4)
        on_ranks = [i for rank in ranks for pack in rank for i in update[pack].tolist()]
        assert sorted(on_ranks) == sorted(update.tolist())


@pytest.mark.parametrize(("name", "together"), [("grpo", 3 / 7), ("real", 1.0)])
def test_two_completions_of_a_prompt_share_an_update_by_chance(name, together):
    """Of eight completions in two updates, three of the seven others are in the same one."""
    group_ids, shared = np.repeat([5, 3], 4), 0
    for seed in range(2000):
        first, _ = divide_rollout(group_ids, 2, True, LOSSES.get(name), seed)
        shared += (0 in first) == (1 in first)
    assert shared / 2000 == pytest.approx(together, abs=0.04)  # 3.6 standard errors


def test_both_groups_are_first_equally_often():
    firsts = [divide_rollout(np.repeat([5, 3], 4), 2, True, LOSSES.get("real"), seed)[0][0] for seed in range(2000)]
    assert np.mean(np.array(firsts) == 0) == pytest.approx(0.5, abs=0.04)
