"""The models of tools/benchmark/drafts.py know their text as well as the table of the benchmark says."""

import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.rollout.engine import Completion
from megatron_grpo.weights import families
from tools.benchmark import drafts

NOISE, CYCLE = 0.2, 16


@pytest.mark.parametrize("which", [0, 1])
@torch.no_grad()
def test_the_next_token_of_the_cycle_has_the_rest_of_the_noise(which):
    options = SimpleNamespace(cycle=CYCLE, completion_length=8)
    args = drafts.parse(drafts.SHAPES["tiny"][which], options)
    config = families.for_args(args).hf_from_args(args)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    missing, unknown = model.load_state_dict(dict(drafts.weights(args, CYCLE, NOISE)), strict=False)
    assert not missing and not unknown
    text = torch.randperm(CYCLE, generator=torch.Generator().manual_seed(1))
    probabilities = model(text[None]).logits[0].double().softmax(-1)
    right = torch.full((CYCLE, args.vocab_size), 0.0, dtype=torch.float64)
    right[:, :CYCLE] = NOISE / (CYCLE - 1)
    right[torch.arange(CYCLE), (text + 1) % CYCLE] = 1 - NOISE
    assert (probabilities - right).abs().max() < 1e-4


class Engine:
    """An engine whose completions have given lengths; every step gives each of them two tokens, one by a draft."""

    def __init__(self, lengths):
        self._left = {number: [0, length] for number, length in enumerate(lengths)}
        self.drafts = np.zeros(3, np.int64)

    def rollout(self, seed):
        return contextlib.nullcontext()

    def submit(self, requests):
        assert {request.id for request in requests} == self._left.keys()

    def poll(self):
        for tokens in self._left.values():
            tokens[0] += 2
            self.drafts += 1, 4, 1
        ended = [number for number, (tokens, length) in self._left.items() if tokens == length]
        return [Completion(number, [0] * self._left.pop(number)[0], None, "stop", []) for number in ended]

    def unfinished(self):
        return [Completion(number, [0] * tokens, None, "abort", []) for number, (tokens, _) in self._left.items()]


def test_a_tail_begins_when_so_many_completions_are_left():
    lengths = [4, 4, 6, 10]
    requests = [SimpleNamespace(id=number) for number in range(len(lengths))]
    parts = drafts.tails(Engine(lengths), requests, [4, 2, 1], seed=0)
    assert {mark: part[1:].tolist() for mark, part in parts.items()} == {
        # steps, completions under way in them, their tokens, drafts, tokens of drafts, accepted
        4: [5, 4 + 4 + 2 + 1 + 1, 24, 12, 48, 12],
        2: [3, 2 + 1 + 1, 8, 4, 16, 4],
        1: [2, 1 + 1, 4, 2, 8, 2],
    }
    assert parts[4][0] >= parts[2][0] >= parts[1][0] >= 0  # seconds


def test_the_table_of_tails(tmp_path):
    options = SimpleNamespace(save=tmp_path, methods=["none", "suffix"], concurrency=[512], rounds=2)
    rows = {  # seconds, steps, completions under way in them, their tokens, drafts, tokens of drafts, accepted
        "none": {"512": [2.0, 1000, 4000, 4000, 0, 0, 0], "4": [0.0, 0, 0, 0, 0, 0, 0]},
        "suffix": {"512": [3.0, 500, 2000, 4000, 1900, 4000, 1000], "4": [0.5, 100, 200, 350, 190, 380, 95]},
    }
    for method, parts in rows.items():
        (tmp_path / f"{method}.json").write_text(json.dumps([{"concurrency": 512, "parts": parts}]))
    _, _, *lines = drafts.table_of_tails(options)
    assert lines == [
        "| 512 | 512 | none | 1.00 | 500 | 2.00 | 1.00 | 2.00 |  |",
        "| 512 | 512 | suffix | 1.50 | 250 | 6.00 | 2.00 | 3.00 | 25% |",
        "| 512 | 4 | suffix | 0.25 | 50 | 5.00 | 1.75 | 2.86 | 25% |",
    ]
