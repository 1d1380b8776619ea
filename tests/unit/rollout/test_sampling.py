"""Sampling of next tokens against transformers' processors, and what they lack by hand."""

from dataclasses import replace

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron_grpo.data.sampling_params import Sampling
from megatron_grpo.rollout.engine import request_seed
from megatron_grpo.rollout.megatron import sampling

VOCAB = 50
PLAIN = Sampling(max_tokens=1)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def draw(given, samplings, prompts=None, outputs=None, seed=0):
    none = [[]] * len(given)
    generator = torch.Generator().manual_seed(seed)
    return sampling.sample(given, samplings, prompts or none, outputs or none, generator)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: sampling.keep_top_k(x, torch.full((8, 1), 5), 5), TopKLogitsWarper(5)),
        (lambda x: sampling.keep_top_k(x, torch.full((8, 1), 70), 70), lambda ids, x: x),
        (lambda x: sampling.keep_top_p(x, torch.full((8, 1), 0.7)), TopPLogitsWarper(0.7)),
        (lambda x: sampling.keep_top_p(x, torch.full((8, 1), 1e-6)), TopPLogitsWarper(1e-6)),
        (lambda x: sampling.keep_min_p(x, torch.full((8, 1), 0.1)), MinPLogitsWarper(0.1)),
    ],
)
def test_truncations_are_transformers(ours, theirs):
    given = logits(8)
    assert torch.equal(ours(given), theirs(None, given))


def test_each_row_has_its_own_settings():
    given = logits(3)
    few = sampling.keep_top_k(given, torch.tensor([[2], [-1], [50]]), 50)
    assert torch.equal(few[1:], given[1:]) and few[0].isfinite().sum() == 2
    kept = sampling.keep_top_p(given, torch.tensor([[0.5], [1.0], [0.9]])).isfinite().sum(1)
    assert kept[0] < kept[2] < kept[1] == VOCAB


def test_the_steps_are_in_order_and_log_probs_are_taken_before_truncation():
    """Frequencies of many draws against the distribution that transformers' processors leave."""
    row, rows = logits(1) / 3, 40_000
    setting = replace(PLAIN, temperature=1.7, min_p=0.02, top_k=12, top_p=0.8)
    tokens, log_probs = draw(row.expand(rows, VOCAB), [setting] * rows)
    scaled = TemperatureLogitsWarper(1.7)(None, row)
    assert torch.allclose(log_probs, scaled.log_softmax(-1)[0, tokens], atol=1e-6)
    left = scaled
    for warper in (MinPLogitsWarper(0.02), TopKLogitsWarper(12), TopPLogitsWarper(0.8)):
        left = warper(None, left)
    expected = left.softmax(-1)[0]
    frequencies = torch.bincount(tokens, minlength=VOCAB) / rows
    assert (frequencies[expected == 0] == 0).all() and 3 < (expected > 0).sum() < 12
    assert torch.allclose(frequencies, expected, atol=4 * (0.25 / rows) ** 0.5)


def test_greedy_rows_among_sampled_ones():
    given = logits(400)
    settings = [replace(PLAIN, temperature=0.0), PLAIN] * 200
    tokens, log_probs = draw(given, settings)
    assert torch.equal(tokens[::2], given.argmax(-1)[::2])
    assert (tokens[1::2] != given.argmax(-1)[1::2]).sum() > 50
    assert torch.allclose(log_probs, given.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-6)
    alone, _ = draw(given[::2], settings[::2])
    assert torch.equal(alone, tokens[::2])


def test_repetition_penalty_is_transformers():
    """Over prompt and output alike."""
    given, prompt, output = logits(1), [3, 7, 7, 11], [7, 20]
    penalized = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([prompt + output]), given)
    ours = sampling.penalize(given, [prompt], [output], *(torch.tensor([[x]]) for x in (1.8, 0.0, 0.0)))
    assert torch.equal(ours, penalized)
    setting = replace(PLAIN, temperature=0.5, repetition_penalty=1.8)
    tokens, log_probs = draw(given, [setting], [prompt], [output])
    assert torch.allclose(log_probs, (penalized / 0.5).log_softmax(-1)[0, tokens])


def test_presence_and_frequency_penalties_by_hand():
    """Of the output alone; a token that came three times loses 0.5 + 3 * 0.25."""
    given = torch.zeros(2, VOCAB)
    columns = (torch.tensor([[1.0], [1.0]]), torch.tensor([[0.5], [0.0]]), torch.tensor([[0.25], [1.0]]))
    ours = sampling.penalize(given, [[1, 2], [1]], [[4, 4, 4, 9], [1]], *columns)
    expected = torch.zeros(2, VOCAB)
    expected[0, 4], expected[0, 9], expected[1, 1] = -1.25, -0.75, -1.0
    assert torch.equal(ours, expected)


def test_a_seed_gives_the_same_draws():
    given = logits(64)
    first, again, other = (draw(given, [PLAIN] * 64, seed=seed)[0] for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_every_request_of_every_rollout_has_a_seed_of_its_own():
    seeds = [request_seed(rollout, request) for rollout in (0, 1, 2**31 - 1) for request in range(2000)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(1, 7) == request_seed(1, 7)
