"""The rules of bounded staleness, with made-up engines that complete groups in any order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.rollout.staleness import groups_to_start, groups_to_take


def test_by_hand():
    """K = 1, two groups a batch: four start; the first two complete are taken, and then the rest is due."""
    assert groups_to_start(0, 0, 2, 1) == 4
    births = dict.fromkeys(range(4), 0)
    assert groups_to_take(births, {2}, 0, 2, 1) is None
    assert groups_to_take(births, {3, 2, 1}, 0, 2, 1) == [1, 2]
    assert groups_to_start(4, 1, 2, 1) == 2
    births = {0: 0, 3: 0, 4: 1, 5: 1}
    assert groups_to_take(births, {3, 4, 5}, 1, 2, 1) is None  # group 0 is due
    assert groups_to_take(births, {0, 3, 4, 5}, 1, 2, 1) == [0, 3]


def test_without_staleness_a_batch_is_what_was_started_for_it():
    assert groups_to_start(6, 2, 3, 0) == 3
    births = {6: 2, 7: 2, 8: 2}
    assert groups_to_take(births, {6, 8}, 2, 3, 0) is None
    assert groups_to_take(births, {6, 7, 8}, 2, 3, 0) == [6, 7, 8]


def test_groups_behind_the_window_wait():
    births = dict.fromkeys(range(8), 0)  # K = 3, two groups a batch: the window is four
    assert groups_to_take(births, {0, 4, 5, 6, 7}, 0, 2, 3) is None
    assert groups_to_take(births, {0, 3, 4, 5, 6, 7}, 0, 2, 3) == [0, 3]


def test_a_replica_without_a_share_takes_nothing():
    assert groups_to_start(0, 0, 0, 2) == 0
    assert groups_to_take({}, set(), 0, 0, 2) == []


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(0, 4), st.integers(1, 12))
def test_whatever_the_order_the_bound_holds_and_every_group_is_taken_once(data, quota, max_staleness, batches):
    births, complete, taken, started = {}, set(), [], 0
    for version in range(batches):
        count = groups_to_start(started, version, quota, max_staleness)
        assert count == (quota if version else (max_staleness + 1) * quota)
        births |= dict.fromkeys(range(started, started + count), version)
        started += count
        while (chosen := groups_to_take(births, complete, version, quota, max_staleness)) is None:
            running = sorted(births.keys() - complete)
            assert running  # else nothing would ever change
            complete.add(data.draw(st.sampled_from(running)))
        assert len(chosen) == quota and chosen == sorted(chosen) and set(chosen) <= complete
        assert all(version - births[group] <= max_staleness for group in chosen)
        for group in chosen:
            del births[group]
            complete.remove(group)
        taken += chosen
    assert len(set(taken)) == len(taken)
    assert set(taken) | births.keys() == set(range(started))
