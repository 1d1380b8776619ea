"""Groups chosen among more than a rollout needs: which are kept, replaced, aborted, and what goes back."""

import os
from argparse import Namespace

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_engine import GENERATIONS, CountingEngine, Letters, TableScorer, prompts

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.observability.metrics import Timers
from megatron_grpo.parallel import initialize
from megatron_grpo.rollout.collect import collect_rollout
from megatron_grpo.rollout.dynamic_sampling import (
    STEPS_TO_SCORE,
    Selection,
    filter_reward,
    filter_weights,
    has_signal,
    prompts_to_draw,
)
from megatron_grpo.rollout.plan import RolloutPlan


@pytest.fixture(scope="module", autouse=True)
def one_process():
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ[name] = value
    dist.init_process_group("gloo")
    kept, initialize._host_group = initialize._host_group, dist.group.WORLD
    yield
    initialize._host_group = kept
    dist.destroy_process_group()


def choose(num_groups, polls, signals=None, ratio=1.0, rounds=0):
    """(engine, rows of the kept groups in order, unused numbers, metrics); ``signals``: whether a prompt has one."""
    engine = CountingEngine(polls)
    scorer = TableScorer(lambda number, place: float(place * signals(number)) if signals else 1.0)
    selection = Selection(engine, num_groups, GENERATIONS, ratio, rounds, scorer, [1.0])
    drawn = prompts(prompts_to_draw(num_groups, ratio, rounds))
    plan = RolloutPlan(drawn, GENERATIONS, Sampling(9), 0, selection)
    batch, _ = collect_rollout(engine, plan, scorer, Letters, Timers())
    unused, metrics = selection.close()
    assert batch.sample_ids.tolist() == list(range(num_groups * GENERATIONS))
    assert batch.group_ids.tolist() == [g for g in range(num_groups) for _ in range(GENERATIONS)]
    rows = batch.row_ids[::GENERATIONS].tolist()
    assert batch.row_ids.tolist() == [row for row in rows for _ in range(GENERATIONS)]
    # A completion is still that of its prompt: the engine's first token is the prompt's plus 7.
    starts = batch.cu_seqlens[:-1]
    assert batch.tokens[starts + 1].tolist() == (batch.tokens[starts] + 7).tolist() == (batch.row_ids + 7).tolist()
    if signals:
        expected = [float(g * signals(row)) for row in rows for g in range(GENERATIONS)]
        assert batch.rewards[:, 0].tolist() == expected
    return engine, rows, unused, metrics


@pytest.mark.parametrize(
    ("rewards", "answer"),
    [([0, 1], True), ([1, 1, 1], False), ([np.nan, 1], False), ([np.nan, np.nan], False), ([np.nan, 1, 0.5], True)],
)
def test_a_signal_is_a_difference_between_scored_rewards(rewards, answer):
    assert has_signal(np.array(rewards, np.float32)) is answer


def kept(funcs, weights, rewards, named=None):
    args = Namespace(reward_funcs=funcs.split(), reward_weights=weights, dynamic_sample_reward=named)
    return has_signal(filter_reward(np.array(rewards, np.float32), filter_weights(args)))


WRONG = [[0, 0, 0], [0, 0, -0.1], [0, -0.5, 0], [0, -1, -0.3]]  # four wrong completions with penalties


def test_penalties_alone_are_no_signal():
    """DAPO, equation 11: a group needs a right and a wrong answer."""
    funcs = "accuracy soft_overlong repetition"
    assert not kept(funcs, [1, 1, 1], WRONG)
    assert kept(funcs, [1, 1, 1], [[1, 0, 0], *WRONG])
    assert not kept(funcs, [1, 1, 1], [[1, 0, 0], [1, -1, 0]])
    assert kept("soft_overlong repetition", [1, 1], [row[1:] for row in WRONG])  # nothing else is there
    assert kept("accuracy soft_overlong", [0, 1], [[0, 0], [0, -1]])  # nothing else has a weight
    assert kept("accuracy soft_overlong", [0, 1], [[0, 0], [1, -1]])
    assert not kept("accuracy soft_overlong", [0, 1], [[0, -1], [1, -1]])


def test_the_rewards_that_must_differ_can_be_named():
    funcs, mixed = "accuracy format soft_overlong", [[0, 0, 0], [0, 1, -1]]
    assert kept(funcs, [1, 1, 1], mixed) and not kept(funcs, [1, 1, 1], mixed, ["accuracy"])
    assert kept(funcs, [1, 1, 1], mixed, ["soft_overlong"])
    assert not kept(funcs, [1, 1, 1], mixed, ["format", "soft_overlong"])  # 1 - 1
    assert not kept(funcs, [1, 0, 1], mixed)
    assert kept(funcs, [1, 0, 1], mixed, ["format"])
    assert not kept(funcs, [1, 1, 1], [[np.nan, np.nan, 0], [np.nan, np.nan, -1]])


def test_groups_without_signal_are_replaced_by_the_next_prompts():
    """Prompts 1 and 4 of the first round (0 to 3) and its replacements (4, 5, ...) have none."""
    _, rows, unused, metrics = choose(4, lambda number: 2, signals=lambda number: number not in (1, 4), rounds=2)
    assert rows == [0, 2, 3, 5]
    assert unused == list(range(6, 4 + 2 * 4))
    assert metrics == {"sampling/resampled_groups": 2, "sampling/rounds": 2, "sampling/aborted_groups": 0}


def test_a_replacement_is_begun_while_others_are_generated():
    engine, rows, _, _ = choose(2, lambda n: {0: 3, 1: 99, 2: 5}[n], signals=lambda number: number > 0, rounds=1)
    assert rows == [1, 2]
    begun = {number: step for step, what, number in engine.log if what == "begin"}
    assert begun == {0: 0, 1: 0, 2: 3 + STEPS_TO_SCORE}  # and prompt 1 takes until step 99


def test_with_nothing_else_to_generate_it_is_begun_at_once():
    engine, _, _, _ = choose(1, lambda number: 3, signals=lambda number: number == 2, rounds=2)
    assert [(step, number) for step, what, number in engine.log if what == "begin"][::GENERATIONS] == [
        (0, 0),
        (3, 1),
        (6, 2),
    ]


def test_what_is_lacking_after_all_rounds_is_filled_with_the_first_groups_without_signal():
    _, rows, unused, metrics = choose(3, lambda number: 1, signals=lambda number: number == 4, rounds=2)
    # 0, 1, 2 are replaced by 3, 4, 5, and 3 and 5 by 6 and 7; of those without signal the first two fill up.
    assert rows == [0, 1, 4]
    assert unused == [8]
    assert metrics == {"sampling/resampled_groups": 5, "sampling/rounds": 2, "sampling/aborted_groups": 0}


def test_the_first_complete_groups_are_kept_and_the_others_aborted():
    engine, rows, unused, metrics = choose(4, lambda n: [5, 50, 3, 4, 50, 2][n], ratio=1.5)
    assert rows == [0, 2, 3, 5] and unused == [1, 4]
    assert [entry for entry in engine.log if entry[1] == "abort"] == [(5, "abort", 1)] * 2 + [(5, "abort", 4)] * 2
    assert engine.steps == 5 and not engine.running
    assert metrics == {"sampling/resampled_groups": 0, "sampling/rounds": 0, "sampling/aborted_groups": 2}


def test_more_prompts_spare_replacements():
    """Of 4 begun for 2 groups two have no signal: nothing needs to replace them."""
    _, rows, unused, metrics = choose(2, lambda n: 2, signals=lambda n: n in (1, 3), ratio=2.0, rounds=3)
    assert rows == [1, 3] and unused == list(range(4, 10))
    assert metrics["sampling/resampled_groups"] == 2 and metrics["sampling/rounds"] == 0


@pytest.mark.parametrize(("ratio", "count"), [(1.0, 10), (1.1, 11), (1.15, 12), (2.0, 20)])
def test_the_ratio_is_rounded_up(ratio, count):
    assert prompts_to_draw(10, ratio, 0) == count
    assert prompts_to_draw(10, ratio, 3) == count + 30


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 40), min_size=64, max_size=64),
    st.lists(st.booleans(), min_size=64, max_size=64),
    st.sampled_from([1.0, 1.3, 2.0]),
    st.integers(0, 3),
)
def test_whatever_happens_the_rollout_is_whole(num_groups, polls, signals, ratio, rounds):
    _, rows, unused, metrics = choose(num_groups, polls.__getitem__, signals.__getitem__, ratio, rounds)
    assert len(set(rows)) == len(rows) and not set(rows) & set(unused)
    if not rounds:
        return
    drawn = prompts_to_draw(num_groups, ratio, rounds)
    assert len(rows) + metrics["sampling/resampled_groups"] + len(unused) == drawn
    if not all(signals[row] for row in rows):  # then nothing better was to be had
        used = set(range(drawn)) - set(unused)
        assert sum(signals[number] for number in used) == sum(signals[row] for row in rows)
        assert metrics["sampling/rounds"] == rounds
