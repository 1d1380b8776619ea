"""Weights and mismatch by hand and by plain loops, that parts add up to the whole, and what the loss makes of them."""

import math

import numpy as np
import pytest
import torch
from importance_sampling_loops import check_against_loops

import pretrain_grpo
from megatron_grpo.algorithm.arguments import IMPORTANCE_SAMPLING_MODES
from megatron_grpo.algorithm.importance_sampling import importance_weights, mismatch, mismatch_metrics
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.errors import GrpoError

NAN = math.nan

# ---- weights

# Two completions of two and three tokens, each behind one token of a prompt; the last token is not in the loss.
CU_SEQLENS = np.array([0, 3, 7])
LOSS_MASK = np.uint8([0, 1, 1, 0, 1, 1, 0])
RATIOS = [4.0, 0.25, 16.0, 1.0]  # geometric means 1 and 4


def recorded(ratios: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of trainer and engine with these ratios on the tokens in the loss, NaN elsewhere."""
    trainer, engine = np.full((2, len(LOSS_MASK)), NAN, np.float32)
    engine[LOSS_MASK == 1] = [-3.0, -5.0, -4.0, -9.0]
    trainer[LOSS_MASK == 1] = engine[LOSS_MASK == 1] + np.log(ratios)
    return trainer, engine


@pytest.mark.parametrize(
    ("mode", "expected", "clipped"),
    [  # with upper bound 2, and lower bound 0.3
        ("token_truncate", [2.0, 0.25, 2.0, 1.0], 2 / 4),
        ("token_mask", [0.0, 0.25, 0.0, 1.0], 2 / 4),
        ("sequence_truncate", [1.0, 1.0, 2.0, 2.0], 2 / 4),
        ("sequence_mask", [4.0, 0.25, 0.0, 0.0], 2 / 4),
        ("icepop", [0.0, 0.0, 0.0, 1.0], 3 / 4),
    ],
)
def test_weights_by_hand(mode, expected, clipped):
    result = importance_weights(mode, *recorded(RATIOS), LOSS_MASK, CU_SEQLENS, 2.0, 0.3)
    assert result.weights.dtype == np.float32
    np.testing.assert_allclose(result.weights, [1, *expected[:2], 1, *expected[2:], 1], rtol=1e-6)
    assert result.clipped.sum() / np.sum(LOSS_MASK) == clipped


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_equal_policies_are_not_weighed(mode):
    result = importance_weights(mode, *recorded([1.0] * 4), LOSS_MASK, CU_SEQLENS, 2.0, 0.5)
    assert (result.weights == 1).all() and not result.clipped.any()


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_weights_against_loops(mode):
    rng = np.random.default_rng(4)
    cu_seqlens = np.concatenate([[0], np.cumsum(rng.integers(1, 40, 50))])
    response_mask = rng.integers(0, 2, cu_seqlens[-1]).astype(np.uint8)  # some sequences have no token in the loss
    trainer, engine = -rng.exponential(2, (2, len(response_mask))).astype(np.float32)
    engine[:20] -= 30  # beyond the clamp
    assert 0 < check_against_loops(mode, trainer, engine, response_mask, cu_seqlens, 2.0, 0.5) < 1


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("value", [NAN, -math.inf])
def test_missing_log_probabilities_are_refused(which, value):
    arrays = recorded(RATIOS)
    arrays[which][5] = value
    with pytest.raises(GrpoError, match="1 of 4 are missing or infinite"):
        importance_weights("token_truncate", *arrays, LOSS_MASK, CU_SEQLENS, 2.0)


def test_unknown_mode():
    with pytest.raises(ValueError, match="'token'"):
        importance_weights("token", *recorded(RATIOS), LOSS_MASK, CU_SEQLENS, 2.0)


def test_the_loss_weighs_the_policy_term_alone(monkeypatch):
    """By hand: d loss / d lp = w (-c A + beta (1 - exp(-x))), x = lp - lp_ref, with ratio 1."""
    monkeypatch.setattr(pretrain_grpo.parallel_state, "get_data_parallel_world_size", lambda: 1)
    monkeypatch.setattr(pretrain_grpo, "whole_pack", lambda values, *_: values)
    args = parse_args(
        "--rollout-importance-sampling-mode token_mask --beta 0.1 --epsilon 0.2 --epsilon-high 0.2".split()
    )
    weights, corrections, advantages = torch.tensor([[0.5, 0.5, 0.25], [0.0, 1.5, 1.0], [2.0, -1.0, 3.0]])
    x = torch.tensor([0.3, -0.2, 1.0])
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    batch = {"weights": weights, "advantages": advantages, "ref_log_probs": log_probs.detach() - x}
    batch |= {"rollout_log_probs": torch.full((3,), NAN), "completion": torch.tensor([0, 0, 1]), "own_labels": None}
    with pytest.raises(KeyError):  # never without them by mistake
        pretrain_grpo.loss_func(args, batch, 1, 1, torch.stack([log_probs, torch.zeros(3)]))
    output = torch.stack([log_probs, torch.zeros(3)])
    loss, report = pretrain_grpo.loss_func(args, batch | {"rollout_importance_weights": corrections}, 1, 1, output)
    loss.backward()
    k3 = torch.exp(-x) - 1 + x
    torch.testing.assert_close(loss.detach(), (weights * (-corrections * advantages + 0.1 * k3)).sum())
    torch.testing.assert_close(log_probs.grad, weights * (-corrections * advantages + 0.1 * (1 - torch.exp(-x))))
    assert {"mismatch/tokens", "mismatch/abs_sum", "mismatch/max"} <= report.keys()


# ---- mismatch


def test_mismatch_by_hand():
    trainer = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    engine = torch.tensor([-1.5, -2.0, NAN, -2.0])
    result = mismatch(trainer, engine)  # d = 0.5, 0, unknown, -1
    assert result["mismatch/tokens"].item() == 3
    assert result["mismatch/abs_sum"].item() == pytest.approx(1.5)
    assert result["mismatch/max"].item() == pytest.approx(1.0)
    assert result["mismatch/k3_sum"].item() == pytest.approx((math.exp(0.5) - 1.5) + math.exp(-1))
    assert not any(value.requires_grad for value in result.values())
    metrics = mismatch_metrics({name: value.item() for name, value in result.items()})
    r = [math.exp(0.5), 1.0, math.exp(-1)]
    assert metrics == pytest.approx(
        {
            "mismatch/mean_abs": 0.5,
            "mismatch/max_abs": 1.0,
            "mismatch/kl": ((math.exp(0.5) - 1.5) + math.exp(-1)) / 3,
            "mismatch/perplexity_ratio": math.exp((1 + 2 + 3) / 3) / math.exp((1.5 + 2 + 2) / 3),
            "mismatch/effective_sample_size": sum(r) ** 2 / sum(x**2 for x in r) / 3,
        }
    )


def test_k3_estimates_the_divergence_from_the_engine_to_the_trainer():
    """The tokens are the engine's: the exact expectation over its distribution is KL(engine || trainer)."""
    engine, trainer = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).log_softmax(1)
    expected = (engine.exp() * (engine - trainer)).sum()
    mean = sum(engine[v].exp() * mismatch(trainer[v : v + 1], engine[v : v + 1])["mismatch/k3_sum"] for v in range(5))
    torch.testing.assert_close(mean, expected)


@pytest.mark.parametrize("engine", [[], [NAN, NAN]])
def test_engine_not_asked(engine):
    result = mismatch(torch.full((len(engine),), -1.0), torch.tensor(engine))
    assert not any(value.item() for value in result.values())
    assert mismatch_metrics(dict.fromkeys(result, 0.0)) == {}


def test_parts_add_up():
    generator = torch.Generator().manual_seed(3)
    trainer, engine = -torch.rand(2, 60, generator=generator)
    engine[::7] = NAN
    whole = mismatch(trainer, engine)
    parts = [mismatch(a, b) for a, b in zip(trainer.split(13), engine.split(13), strict=True)]
    sums = whole.keys() - {"mismatch/max"}
    assert len(sums) == 6
    for name in sums:
        torch.testing.assert_close(sum(part[name] for part in parts), whole[name])
    assert max(part["mismatch/max"] for part in parts) == whole["mismatch/max"]
