"""Prompts handed out as replicas free up: nothing lost, one result, and less idling; balancing_worker.py does it."""

import json

import numpy as np
import pytest
from balancing_worker import GENERATIONS, POLLS, SLOTS
from ranks import run_torchrun

from megatron_grpo.data.batch import RolloutBatch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    directory = tmp_path_factory.mktemp("balancing")
    run_torchrun(4, "tests/distributed/balancing_worker.py", directory)
    return directory


@pytest.fixture(scope="module")
def facts(out):
    return [json.loads((out / f"facts.{rank}.json").read_text()) for rank in range(4)]


def test_every_completion_comes_once_and_in_order_on_every_rank(out):
    static = RolloutBatch.load(out / "static.0.npz")
    assert static.sample_ids.tolist() == list(range(len(POLLS) * GENERATIONS))
    assert static.row_ids.tolist() == [50 + p for p in range(len(POLLS)) for _ in range(GENERATIONS)]
    for path in sorted(out.glob("*.npz")):
        batch = RolloutBatch.load(path)
        for one, other in zip(static.arrays().values(), batch.arrays().values(), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=path.name)


def test_every_completion_keeps_its_own_weight_version(out):
    batch = RolloutBatch.load(out / "dynamic.0.npz")
    assert batch.weight_version.tolist() == np.repeat(1000 + batch.sample_ids, batch.lengths).tolist()


def test_replicas_idle_less(facts):
    """Replica 0 has all prompts of 40 polls when they are dealt out: 12, two at a time, and then one of 7."""
    polls = {name: [rank[name]["polls"] for rank in facts] for name in ("static", "dynamic", "dynamic again")}
    for a, b, c, d in polls.values():
        assert a == b and c == d  # the ranks of a replica are in step
    assert polls["static"] == [247, 247, 15, 15]
    for name in ("dynamic", "dynamic again"):
        assert max(polls[name]) < 0.75 * 247
        assert max(polls[name]) - min(polls[name]) <= 80  # two rounds of long ones, however busy the machine


def test_replicas_take_no_more_than_they_have_room_for(facts):
    for rank in facts:
        assert SLOTS <= rank["dynamic"]["largest"] < SLOTS + GENERATIONS


def test_with_room_for_all_nothing_is_drawn(facts):
    assert [rank["enough room"] for rank in facts] == [rank["static"] for rank in facts]
