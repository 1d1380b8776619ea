"""The updates of a rollout: which completions each of them has, shuffled and in order."""

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
    """real and dpo compare completions of a prompt, bnpo averages over blocks; all others are sums over completions."""
    assert WHOLE == ["bnpo", "real", "dpo"]
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
    """(completions of a rollout, number of updates), of groups of equal size."""
    steps = draw(st.integers(1, 4))
    return steps * draw(st.integers(1, 4)) * draw(st.integers(1, 5)), steps


@given(rollouts(), st.booleans(), st.sampled_from(list(LOSSES.entries)), SEEDS)
def test_every_completion_is_in_one_update_of_equal_size(rollout, shuffle, name, seed):
    n, steps = rollout
    updates = divide_rollout(n, steps, shuffle, LOSSES.get(name), seed)
    assert [len(update) for update in updates] == [n // steps] * steps
    assert sorted(np.concatenate(updates).tolist()) == list(range(n))


@given(st.sampled_from(list(LOSSES.entries)), SEEDS)
def test_what_keeps_the_order_of_the_prompts(name, seed):
    """One update, a loss that needs whole groups, and --no-shuffle-completions; nothing else."""
    for steps, shuffle in ((1, True), (1, False), (4, False), (4, True)):
        order = np.concatenate(divide_rollout(128, steps, shuffle, LOSSES.get(name), seed)).tolist()
        assert (order == list(range(128))) == (steps == 1 or not shuffle or name in WHOLE)


@given(st.sampled_from(SPREAD), st.integers(0, 2**31), st.integers(1, 10**6))
@settings(max_examples=50)
def test_the_same_rollout_has_the_same_updates_and_another_has_others(name, seed, rollout):
    """Whatever was drawn from numpy before: on another rank, or in the process that resumes."""

    def order(number):
        return np.concatenate(divide_rollout(128, 4, True, LOSSES.get(name), rollout_seed(seed, number))).tolist()

    first = order(rollout)
    np.random.random(3)
    assert order(rollout) == first != order(rollout + 1)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_an_update_has_the_same_completions_on_any_number_of_ranks(dp_size):
    lengths = np.random.default_rng(0).integers(1, 50, 64)
    for update in divide_rollout(64, 2, True, LOSSES.get("grpo"), 7):
        ranks = schedule(lengths[update], dp_size, micro_batch_size=4)
        on_ranks = [i for rank in ranks for pack in rank for i in update[pack].tolist()]
        assert sorted(on_ranks) == sorted(update.tolist())


@pytest.mark.parametrize(("name", "together"), [("grpo", 3 / 7), ("real", 1.0)])
def test_two_completions_of_a_prompt_share_an_update_by_chance(name, together):
    """Of eight completions in two updates, three of the seven others are in the same one."""
    shared = 0
    for seed in range(2000):
        first, _ = divide_rollout(8, 2, True, LOSSES.get(name), seed)
        shared += (0 in first) == (1 in first)
    assert shared / 2000 == pytest.approx(together, abs=0.04)  # 3.6 standard errors
