"""Toy checkpoints and their completions by transformers, for the tests of --rollout-engine megatron."""

import pytest
import torch
from megatron_engine_worker import EOS, LENGTHS, MAX_TOKENS, prompts
from toy_checkpoints import FAMILIES, MAMBA_MOE, make

TIED = {family: "gemma" in family for family in (*FAMILIES, MAMBA_MOE)}


class Toys(dict):
    """{family: model of transformers}; made, with its checkpoint in ``root``, at its first use."""

    def __init__(self, root):
        super().__init__()
        self.root = root

    def __missing__(self, family):
        self[family] = make(self.root / f"{family}-{TIED[family]}", family, TIED[family]).eval()
        return self[family]


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Return (directory of the checkpoints, `Toys`)."""
    root = tmp_path_factory.mktemp("toys")
    yield root, Toys(root)
    if torch.distributed.is_initialized():  # not initialized if only the test with torchrun has used this fixture
        torch.distributed.destroy_process_group()


@torch.no_grad()
def by_transformers(model) -> list[tuple[list[int], list[float]]]:
    """Return (ids, log-probabilities) of the greedy completion of each prompt, without batching and without a cache."""
    made = []
    for prompt in prompts():
        ids, values = list(prompt), []
        while len(values) < MAX_TOKENS and (not values or ids[-1] != EOS):
            log_p = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(log_p.argmax()))
            values.append(float(log_p.max()))
        made.append((ids[len(prompt) :], values))
    return made


def check(done: dict, expected: list) -> None:
    assert sorted(done) == list(range(len(LENGTHS)))
    for number, (ids, log_probs) in enumerate(expected):
        assert done[number][0] == ids, number
        torch.testing.assert_close(torch.tensor(done[number][1]), torch.tensor(log_probs), atol=1e-4, rtol=0)
        assert done[number][2] == ("stop" if ids[-1] == EOS else "length")
