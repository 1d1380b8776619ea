"""Advantages of turns against numbers worked by hand from the formulas."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.algorithm import advantages
from megatron_grpo.algorithm.advantages import gigpo_advantages, turn_return_advantages, turn_returns

NAN = math.nan
# Three episodes of one group with 2, 1 and 2 turns, and a fourth one that was not scored.
TURN_REWARDS = np.array([[0.5, 1.0, NAN], [NAN, NAN, NAN], [0.5, NAN, NAN], [0.0, NAN, NAN]], np.float32)
TURNS = np.array([2, 1, 2, 1])
R = np.array([2.5, 1.0, 0.5, NAN], np.float32)  # another reward function gave 1, 1 and 0
GROUPS = np.zeros(4, np.int64)
# Prompts of one token, turns of two, one and two tokens, one of the environment between them.
MASK = np.array([0, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1], np.uint8)
CU = np.array([0, 6, 8, 13, 15])


def tokens(turn_advantages):
    first, (second,), third = turn_advantages
    return [0, first[0], first[0], 0, first[1], first[1], 0, second, 0, third[0], 0, third[1], third[1], 0, 0]


def test_returns():
    """r is (0.5, 1 + 1), (1) and (0.5, 0): the last turn has what is missing to R."""
    expected = [[0.5 + 0.5 * 2, 2, NAN], [1, NAN, NAN], [0.5, 0, NAN], [NAN] * 3]
    np.testing.assert_allclose(turn_returns(R, TURN_REWARDS, TURNS, 0.5), expected)
    # Without rewards of turns and without a discount, every turn has R.
    none = np.full((4, 3), NAN, np.float32)
    expected = [[2.5, 2.5, NAN], [1, NAN, NAN], [0.5, 0.5, NAN], [NAN] * 3]
    np.testing.assert_allclose(turn_returns(R, none, TURNS, 1.0), expected)


def test_turns_are_compared_with_the_same_turn():
    """First turns: 1.5, 1, 0.5 have the mean 1 and the std 0.5. Second turns: 2, 0 have 1 and the square root of 2."""
    given = {"rewards": R, "turn_rewards": TURN_REWARDS, "turns": TURNS, "group_ids": GROUPS}
    given |= {"response_mask": MASK, "cu_seqlens": CU}
    found = turn_return_advantages(**given, turn_gamma=0.5, scale_rewards="none")
    np.testing.assert_allclose(found, tokens([(0.5, 1), (0,), (-0.5, -1)]))
    found = turn_return_advantages(**given, turn_gamma=0.5, scale_rewards="group")
    first, second = 0.5 / (0.5 + 1e-4), 1 / (math.sqrt(2) + 1e-4)
    np.testing.assert_allclose(found, tokens([(first, second), (0,), (-first, -second)]), rtol=1e-6)
    # A turn that one episode alone has is compared with nothing.
    alone = given | {"turns": np.array([2, 1, 1, 1]), "response_mask": np.where(np.arange(15) > 10, 0, MASK)}
    found = turn_return_advantages(**alone, turn_gamma=0.5, scale_rewards="none")
    np.testing.assert_allclose(found, tokens([(0.5, 0), (0,), (-0.5, 0)]))


@pytest.mark.parametrize("scale", ["none", "group"])
def test_gigpo_compares_turns_after_equal_states(scale):
    """R = 2.5, 1, 0.5 has the mean 4/3. State 7 has the returns 2 and 1, of episodes 0 and 1; state 8 has 1.5 and 0.5;
    state 9 has one turn."""
    states = np.array([[8, 7, 0], [7, 0, 0], [8, 9, 0], [8, 0, 0]])
    found = gigpo_advantages(
        R, TURN_REWARDS, states, TURNS, GROUPS, MASK, CU, turn_gamma=0.5, gigpo_weight=2.0, scale_rewards=scale
    )
    episodes = np.array([2.5, 1, 0.5]) - 4 / 3
    pair = 0.5
    if scale == "group":
        episodes = episodes / (math.sqrt(((7 / 6) ** 2 + (1 / 3) ** 2 + (5 / 6) ** 2) / 2) + 1e-4)
        pair = 0.5 / (math.sqrt(0.5) + 1e-4)  # two values at a distance of 1
    a, b, c = episodes
    np.testing.assert_allclose(
        found, tokens([(a + 2 * pair, a + 2 * pair), (b - 2 * pair,), (c - 2 * pair, c)]), rtol=1e-6
    )


def test_groups_do_not_share_states():
    """Two groups of one episode each: nothing to compare."""
    found = gigpo_advantages(
        R[:2], TURN_REWARDS[:2], np.array([[1, 2, 0]] * 2), TURNS[:2], np.array([0, 1]), MASK[:8], CU[:3],
        turn_gamma=1.0, gigpo_weight=1.0, scale_rewards="none",
    )  # fmt: skip
    assert not found.any()


@given(st.integers(0, 2**32 - 1), st.sampled_from(["none", "group", "batch"]))
def test_gigpo_is_a_loop_over_the_states_of_each_group(seed, scale):
    """Few states and rewards, so that they repeat; groups in any order, and some episodes without a reward."""
    rng = np.random.default_rng(seed)
    n, most = int(rng.integers(1, 12)), int(rng.integers(1, 5))
    turns, groups = rng.integers(1, most + 1, n), rng.integers(-2, 3, n)
    states = rng.choice([-(2**63), -1, 0, 5, 2**63 - 1], (n, most))
    rewards = rng.choice([NAN, 0.0, 0.25, 1.0], n).astype(np.float32)
    of_turns = rng.choice([NAN, 0.0, 0.5], (n, most)).astype(np.float32)
    mask = np.concatenate([np.tile(np.array([0, 1], np.uint8), count) for count in turns])
    cu = np.concatenate([[0], np.cumsum(2 * turns)])
    found = gigpo_advantages(rewards, of_turns, states, turns, groups, mask, cu, 0.5, 2.0, scale)

    def compared(values: dict, keys: dict) -> dict:
        """Return (value - mean) / scale of each value that is not NaN, among those with the same key; else 0."""
        known = {place: value for place, value in values.items() if not math.isnan(value)}
        result = dict.fromkeys(values, 0.0)
        for place, value in known.items():
            alike = [other for at, other in known.items() if keys[at] == keys[place]]
            result[place] = value - math.fsum(alike) / len(alike)
            spread = {"group": alike, "batch": list(known.values())}.get(scale)
            if spread is not None and len(spread) > 1:
                result[place] /= np.std(spread, ddof=1) + 1e-4
        return result

    returns = turn_returns(rewards, of_turns, turns, 0.5)
    places = [(i, t) for i in range(n) for t in range(turns[i])]
    keys = {(i, t): (groups[i], states[i, t]) for i, t in places}
    within = compared({place: returns[place] for place in places}, keys)
    episodes = compared(dict(enumerate(rewards.astype(float))), dict(enumerate(groups)))
    expected = [value for i, t in places for value in (0.0, episodes[i] + 2.0 * within[i, t])]
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def test_the_groups_of_many_states_are_found_in_a_few_passes():
    """4,000 values in 2,000 groups: the number of numpy's operations must not grow with the groups."""
    calls = []

    class Counted(np.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
            calls.append(ufunc)
            plain = [x.view(np.ndarray) if isinstance(x, Counted) else x for x in inputs]
            return getattr(ufunc, method)(*plain, **kwargs)

    ids, values = np.repeat(np.arange(2000), 2).view(Counted), np.zeros(4000)
    values[[8, 11, 13]] = 1.0, NAN, NAN
    found = list(advantages._groups(values, ids))
    assert [members.tolist() for members in found] == [[8, 9]]
    assert len(calls) < 20
