"""The conductor of engines on ranks of their own, with made-up engines: they finish in any order, die and come back."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.rollout.stream.conductor import Conductor


def start_all(conductor):
    """Start as many groups as may start; return the new ones."""
    rows = range(conductor.started, conductor.started + conductor.to_start())
    return [group for groups in conductor.start(rows).values() for group in groups]


def test_work_goes_to_the_replica_with_least_of_it():
    conductor = Conductor(num_groups=2, max_staleness=2, num_replicas=2)
    first = conductor.start(range(6))
    assert {replica: [group.row for group in groups] for replica, groups in first.items()} == {
        0: [0, 2, 4],
        1: [1, 3, 5],
    }
    for number in (0, 2):
        conductor.finish(number)
    assert [group.number for group in conductor.take()] == [0, 2]
    assert conductor.to_start() == 2
    assert [group.replica for group in start_all(conductor)] == [0, 0]  # it has one group, the other three


def test_a_group_without_signal_is_replaced_at_most_so_often():
    conductor = Conductor(num_groups=1, max_staleness=0, num_replicas=1, max_replaced=2)
    for number in range(2):
        assert [group.number for group in start_all(conductor)] == [number]
        assert conductor.finish(number, has_signal=False)
        assert conductor.take() is None
    assert [group.number for group in start_all(conductor)] == [2]
    assert not conductor.finish(2, has_signal=False)
    assert [group.number for group in conductor.take()] == [2]
    assert (conductor.started, conductor.replaced) == (3, 2)
    start_all(conductor)
    assert conductor.finish(3, has_signal=False)  # counted for each batch


class Replica:
    """An engine replica: it has groups, completes them in any order, and has lost its reports after a restart."""

    def __init__(self):
        self.groups, self.complete = [], set()


@settings(deadline=None)
@given(st.integers(0), st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), st.integers(0, 3))
def test_whatever_happens_the_bound_holds_and_every_group_is_trained_on_once(
    seed, quota, max_staleness, num_replicas, max_replaced
):
    rng = random.Random(seed)
    conductor = Conductor(quota, max_staleness, num_replicas, max_replaced)
    replicas = [Replica() for _ in range(num_replicas)]
    births, trained, dropped = {}, [], []

    def drop_or_keep(replica, group):
        replica.complete.add(group)
        if conductor.finish(group, has_signal=rng.random() < 0.6):
            replica.groups.remove(group)
            replica.complete.remove(group)
            dropped.append(group)

    for version in range(rng.randint(1, 10)):
        while True:
            for group in start_all(conductor):
                births[group.number] = group.birth
                replicas[group.replica].groups.append(group.number)
                assert group.birth == version
            assert len(births) - len(dropped) <= (max_staleness + version + 1) * quota
            if (taken := conductor.take()) is not None:
                break
            working = [
                (replica, group) for replica in replicas for group in replica.groups if group not in replica.complete
            ]
            assert working, "nothing is generated, and nothing can be taken"
            if rng.random() < 0.1:  # the run is killed, and goes on from a checkpoint of this moment
                state = json.loads(json.dumps(conductor.state_dict()))
                conductor = Conductor(quota, max_staleness, num_replicas, max_replaced)
                conductor.load_state_dict(state)
                for replica in replicas:
                    for group in sorted(replica.complete):
                        drop_or_keep(replica, group)
                continue
            drop_or_keep(*rng.choice(working))
        assert len(taken) == quota and conductor.version == version + 1
        for group in taken:
            assert version - births[group.number] <= max_staleness
            replica = replicas[group.replica]
            assert group.number in replica.complete
            replica.groups.remove(group.number)
            replica.complete.remove(group.number)
            trained.append(group.number)
    left = [group for replica in replicas for group in replica.groups]
    assert sorted([*trained, *dropped, *left]) == list(range(conductor.started))


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_short_completions_are_not_preferred(max_staleness):
    """Groups of two lengths, half of each: as many short ones are trained on as start, whatever finishes first."""
    conductor, lengths = Conductor(4, max_staleness, 1), {}
    short = 0
    for step in range(1, 4000):
        for group in start_all(conductor):
            lengths[group.number] = step + (1 if group.number % 2 else 40)
        for number, group in conductor.open.items():
            if lengths[number] <= step and not group.complete:
                conductor.finish(number)
        short += sum(group.number % 2 for group in conductor.take() or ())
    assert short / (4 * conductor.version) == pytest.approx(0.5, abs=0.02)
