"""Mismatch sums by hand, and that parts add up to the whole."""

import math

import pytest
import torch

from megatron_grpo.algorithm.corrections import mismatch

NAN = math.nan


def test_by_hand():
    trainer = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    engine = torch.tensor([-1.5, -2.0, NAN, -2.0])
    result = mismatch(trainer, engine)  # d = 0.5, 0, unknown, -1
    assert result.tokens.item() == 3
    assert result.abs_sum.item() == pytest.approx(1.5)
    assert result.abs_max.item() == pytest.approx(1.0)
    assert result.k3_sum.item() == pytest.approx((math.exp(0.5) - 1.5) + math.exp(-1))
    assert not any(value.requires_grad for value in result)


def test_k3_estimates_the_divergence_from_the_engine_to_the_trainer():
    """The tokens are the engine's: the exact expectation over its distribution is KL(engine || trainer)."""
    engine, trainer = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).log_softmax(1)
    expected = (engine.exp() * (engine - trainer)).sum()
    mean = sum(engine[v].exp() * mismatch(trainer[v : v + 1], engine[v : v + 1]).k3_sum for v in range(5))
    torch.testing.assert_close(mean, expected)


@pytest.mark.parametrize("engine", [[], [NAN, NAN]])
def test_engine_not_asked(engine):
    result = mismatch(torch.full((len(engine),), -1.0), torch.tensor(engine))
    assert [value.item() for value in result] == [0.0] * 4


def test_parts_add_up():
    generator = torch.Generator().manual_seed(3)
    trainer, engine = -torch.rand(2, 60, generator=generator)
    engine[::7] = NAN
    whole = mismatch(trainer, engine)
    parts = [mismatch(a, b) for a, b in zip(trainer.split(13), engine.split(13), strict=True)]
    for name in ("tokens", "abs_sum", "k3_sum"):
        torch.testing.assert_close(sum(getattr(part, name) for part in parts), getattr(whole, name))
    assert max(part.abs_max for part in parts) == whole.abs_max
