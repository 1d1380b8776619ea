"""The exchange of a rollout: every rank gets the numbers of all completions, and the tokens that it asks for."""

import math

import numpy as np
import pytest
from ranks import run_torchrun
from share_worker import NUMBER, made_by, wanted, whole_rollout

from megatron_grpo.data.batch import FIELDS, RolloutBatch
from megatron_grpo.data.prefix_tree import with_prefixes

pytestmark = pytest.mark.distributed
WORLDS = (1, 4)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    directory = tmp_path_factory.mktemp("share")
    for world in WORLDS:
        run_torchrun(world, "tests/distributed/share_worker.py", directory)
    return directory


def check(batch: RolloutBatch, held: np.ndarray) -> None:
    """The batch has the whole rollout's numbers, and its tokens where ``held``."""
    whole = with_prefixes(whole_rollout())
    assert batch.held.tolist() == held.tolist()
    assert batch.lengths.tolist() == whole.lengths.tolist()
    assert batch.response_lengths.tolist() == whole.response_lengths.tolist()
    tokens = whole.token_positions(np.flatnonzero(held))
    for name, spec in FIELDS.items():
        expected, found = getattr(whole, name), getattr(batch, name)
        if expected is not None and spec.axis != "offset":
            np.testing.assert_array_equal(found, expected[tokens] if spec.axis == "token" else expected, name)


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_has_the_numbers_of_all_and_the_tokens_it_wants(out, world):
    for rank in range(world):
        made = np.array([made_by(number, world) == rank for number in range(NUMBER)])
        check(RolloutBatch.load(out / f"made.{world}.{rank}.npz"), made)
        everything = RolloutBatch.load(out / f"everything.{world}.{rank}.npz")
        check(everything, np.ones(NUMBER, bool))
        assert everything.holds_all
        mine = RolloutBatch.load(out / f"mine.{world}.{rank}.npz")
        check(mine, wanted(rank, world))
        assert not mine.holds_all


@pytest.mark.parametrize("world", WORLDS)
def test_values_reach_all_ranks_with_the_completion(out, world):
    whole = whole_rollout()
    someone = np.any([wanted(rank, world) for rank in range(world)], axis=0)
    sums = np.bincount(whole.completion_of_tokens, whole.tokens)
    in_loss = whole.response_positions(np.flatnonzero(someone))
    for rank in range(world):
        mine = RolloutBatch.load(out / f"mine.{world}.{rank}.npz")
        with np.load(out / f"mine.{world}.{rank}.of_completions.npz") as found:
            assert found["spread"].tolist() == (2.0 * mine.tokens).tolist()
            assert found["sums"][someone].tolist() == sums[someone].tolist()
            expected = np.sqrt(whole.tokens[in_loss]).sum() / whole.response_lengths.sum()
            assert math.isclose(found["mean"], expected, rel_tol=1e-12)
