"""Every rank chooses the same groups; selection_worker.py has the rollouts."""

import json

import numpy as np
import pytest
from ranks import run_torchrun
from selection_engine import GENERATIONS
from selection_worker import GROUPS, ROLLOUTS, STALENESS, polls, rewards

PARTIAL = ("partial", "kept", "synced", "paused")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    out = tmp_path_factory.mktemp("selection")
    run_torchrun(2, "tests/distributed/selection_worker.py", out)
    return {
        layout: [json.loads((out / f"{layout}.{rank}.json").read_text()) for rank in range(2)]
        for layout in ("one", "two", "server", *(f"{how} {n}" for how in PARTIAL for n in ("one", "two")))
    }


@pytest.mark.distributed
def test_every_rank_comes_to_the_same_decisions(facts):
    for layout in ("one", "two", "server"):
        first, second = facts[layout]
        for name in ("rows", "groups", "samples", "rewards", "unused", "metrics"):
            assert first[name] == second[name], (layout, name)
        assert first["samples"] == list(range(GROUPS * GENERATIONS))
    one, server = facts["one"], facts["server"]
    assert one[0]["log"] == one[1]["log"] == server[0]["log"] and not server[1]["log"]
    assert one[0]["rows"] == server[0]["rows"]


@pytest.mark.distributed
def test_replicas_choose_within_their_shares(facts):
    """Of prompts 0 to 6 of the first round replica 0 has the even ones, of 5 groups 0, 2 and 4; fresh ones alike."""
    first, second = facts["two"]
    begun = [{number - 50 for _, what, number in rank["log"] if what == "begin"} for rank in (first, second)]
    assert begun[0] >= {0, 2, 4, 6} and begun[1] >= {1, 3, 5} and not begun[0] & begun[1]
    rows = [row - 50 for row in first["rows"][::GENERATIONS]]
    assert {rows[i] for i in (0, 2, 4)} <= begun[0] and {rows[i] for i in (1, 3)} <= begun[1]
    assert all((row + 50) % 3 for row in rows)  # enough with a signal


@pytest.mark.distributed
@pytest.mark.parametrize("how", PARTIAL)
@pytest.mark.parametrize("replicas", [1, 2])
def test_partial_rollouts_are_the_same_on_every_rank_and_lose_nothing(facts, replicas, how):
    """Every group is in one batch, with its own completions, rewards and versions, within the bound."""
    first, second = facts[f"{how} {'one' if replicas == 1 else 'two'}"]
    assert first == second
    trained: list[int] = []
    for rollout, batch in enumerate(first):
        assert batch["sample_ids"] == list(range(GROUPS * GENERATIONS))
        assert batch["group_ids"] == [group for group in range(GROUPS) for _ in range(GENERATIONS)]
        numbers = np.array(batch["row_ids"]) - 50
        place = np.array(batch["sample_ids"]) % GENERATIONS
        assert (numbers % GROUPS % replicas == np.array(batch["group_ids"]) % replicas).all()
        assert batch["lengths"] == [polls(int(number)) for number in numbers * GENERATIONS + place]
        assert batch["rewards"] == [[rewards(int(50 + n), int(p))] for n, p in zip(numbers, place, strict=True)]
        born = np.maximum(numbers // GROUPS - STALENESS, 0)
        oldest = 0 if how == "paused" else rollout - STALENESS  # a pause has a step, with the seed 0 for a version
        assert (rollout - born <= STALENESS).all() and min(batch["versions"]) >= oldest
        assert max(batch["versions"]) <= rollout
        trained += sorted(set(numbers.tolist()))
    assert len(set(trained)) == len(trained) == GROUPS * ROLLOUTS
    assert any(len(set(batch["versions"])) > 1 for batch in first)
