"""A group-wise reward end to end: on one replica and on two, the same values; group_reward_worker.py runs it."""

import re

import numpy as np
import pytest
from group_reward_worker import GENERATIONS, PROMPTS
from ranks import REPO, run_torchrun

from megatron_grpo.data.batch import RolloutBatch

pytestmark = pytest.mark.distributed
LENGTH = """
from megatron_grpo.rewards.registry import register_reward

@register_reward("length")
def length(sample):
    return len(sample.token_ids)
"""


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Rollouts by name and number of replicas, scored by the plug-in of docs/rewards.md."""
    out = tmp_path_factory.mktemp("groups")
    blocks = re.findall(r"```python\n(.*?)```", (REPO / "docs/rewards.md").read_text(), re.S)
    (out / "diverse.py").write_text(next(block for block in blocks if "register_group_reward(" in block))
    (out / "length.py").write_text(LENGTH)
    for replicas in (1, 2):
        run_torchrun(replicas, "tests/distributed/group_reward_worker.py", out / "diverse.py", out)
    names = ("static", "dynamic", "over-sampled", "single")
    return {(name, n): RolloutBatch.load(out / f"{name}.{n}.npz") for name in names for n in (1, 2)}


def test_values_are_those_of_whole_groups(rollouts):
    """1 / (how often the completion occurs in its group), from the tokens of the batch."""
    for (name, _), batch in rollouts.items():
        tokens = batch.tokens[batch.response_mask == 1]
        groups = batch.group_ids
        counts = [((groups == group) & (tokens == token)).sum() for group, token in zip(groups, tokens, strict=True)]
        np.testing.assert_allclose(batch.rewards[:, 1], 1 / np.array(counts), rtol=1e-6)
        assert (batch.rewards[:, 0] == 1).all()
        size = 1 if name == "single" else GENERATIONS
        assert batch.num_completions == PROMPTS * size // (2 if name == "over-sampled" else 1)
        assert (np.bincount(groups) == size).all()
        assert (len(set(counts)) > 1) == (name != "single")


def test_one_replica_and_two_give_the_same(rollouts):
    """Whatever the order in which completions of different groups finish, and the replica of a prompt."""
    for name in ("static", "dynamic", "single"):
        one, two = rollouts[name, 1], rollouts[name, 2]
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.rewards, two.rewards)
    np.testing.assert_array_equal(rollouts["static", 1].rewards, rollouts["dynamic", 2].rewards)
