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

# Of numbers in float64: the default, 1e-7, would hide a rounding to float32.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

NAN = math.nan

# ---- weights

# Two completions, of two tokens in the loss each.
COMPLETION = torch.tensor([0, 0, 1, 1])
RATIOS = [4.0, 0.25, 16.0, 1.0]  # geometric means 1 and 4


def recorded(ratios: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of trainer and engine with these ratios, and the completion of each token."""
    engine = torch.tensor([-3.0, -5.0, -4.0, -9.0])
    return engine + torch.tensor(ratios).log(), engine, COMPLETION


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
    result = importance_weights(mode, *recorded(RATIOS), 2.0, 0.3)
    torch.testing.assert_close(result.weights, torch.tensor(expected))
    assert result.clipped.float().mean() == clipped


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_equal_policies_are_not_weighed(mode):
    result = importance_weights(mode, *recorded([1.0] * 4), 2.0, 0.5)
    assert (result.weights == 1).all() and not result.clipped.any()


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_weights_against_loops(mode):
    rng = np.random.default_rng(4)
    cu_seqlens = np.concatenate([[0], np.cumsum(rng.integers(1, 40, 50))])
    response_mask = rng.integers(0, 2, cu_seqlens[-1]).astype(np.uint8)  # some sequences have no token in the loss
    trainer, engine = -rng.exponential(2, (2, len(response_mask))).astype(np.float32)
    engine[:20] -= 30  # beyond the clamp
    assert 0 < check_against_loops(mode, trainer, engine, response_mask, cu_seqlens, 2.0, 0.5) < 1


def test_unknown_mode():
    with pytest.raises(ValueError, match="'token'"):
        importance_weights("token", *recorded(RATIOS), 2.0)


def loss_of(flags: str, batch: dict, log_probs: torch.Tensor, monkeypatch) -> tuple[torch.Tensor, dict]:
    monkeypatch.setattr(pretrain_grpo.parallel_state, "get_data_parallel_world_size", lambda: 1)
    monkeypatch.setattr(pretrain_grpo, "whole_pack", lambda values, *_: values)
    args = parse_args(f"--rollout-importance-sampling-threshold 2 --epsilon 0.2 --epsilon-high 0.2 {flags}".split())
    return pretrain_grpo.loss_func(args, batch, 1, 1, torch.stack([log_probs, torch.zeros(len(log_probs))]))


def test_the_loss_weighs_the_policy_term_alone(monkeypatch):
    """By hand: d loss / d lp = w (-c A + beta (1 - exp(-x))), x = lp - lp_ref, with ratio 1."""
    weights, corrections, advantages = torch.tensor([[0.5, 0.5, 0.25], [0.0, 1.5, 1.0], [2.0, -1.0, 3.0]])
    ratios, x = torch.tensor([2.5, 1.5, 1.0]), torch.tensor([0.3, -0.2, 1.0])
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    batch = {"weights": weights, "advantages": advantages, "ref_log_probs": log_probs.detach() - x}
    batch |= {"rollout_log_probs": log_probs.detach() - ratios.log(), "completion": torch.tensor([0, 0, 1])}
    batch["own_labels"] = None
    flags = "--rollout-importance-sampling-mode token_mask --beta 0.1"
    loss, report = loss_of(flags, batch, log_probs, monkeypatch)
    loss.backward()
    k3 = torch.exp(-x) - 1 + x
    torch.testing.assert_close(loss.detach(), (weights * (-corrections * advantages + 0.1 * k3)).sum())
    torch.testing.assert_close(log_probs.grad, weights * (-corrections * advantages + 0.1 * (1 - torch.exp(-x))))
    assert {"mismatch/tokens", "mismatch/abs_sum", "mismatch/max"} <= report.keys() and report["mismatch/clipped"] == 1
    without = loss_of(
        "--rollout-importance-sampling-mode token_mask",
        batch | {"rollout_log_probs": log_probs * NAN},
        log_probs,
        monkeypatch,
    )
    assert without[0].isnan()  # never 1 by mistake


def test_later_updates_keep_the_weights_of_the_first(monkeypatch):
    """The weight is of lp_old, whatever lp has become; the ratio lp / lp_old is the loss's own."""
    log_probs, old = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.1, -1.9])
    batch = {"weights": torch.ones(2), "advantages": torch.ones(2), "completion": torch.tensor([0, 0])}
    batch |= {"own_labels": None, "old_log_probs": old, "rollout_log_probs": old - torch.tensor([1.5, 0.5]).log()}
    loss, _ = loss_of("--rollout-importance-sampling-mode token_truncate --beta 0", batch, log_probs, monkeypatch)
    torch.testing.assert_close(loss, -(torch.tensor([1.5, 0.5]) * (log_probs - old).exp()).sum())


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


def test_mismatch_of_the_newest_weights():
    trainer, engine = torch.tensor([-1.0, -2.0, -0.5, -3.0]), torch.tensor([-1.5, -2.25, NAN, -2.0])
    totals = mismatch(trainer, engine, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    metrics = mismatch_metrics({name: value.item() for name, value in totals.items()})
    assert metrics["mismatch/newest_mean_abs"] == pytest.approx((0.5 + 0.25) / 2)
    none = mismatch(trainer, engine, torch.zeros(4))
    assert "mismatch/newest_mean_abs" not in mismatch_metrics({name: value.item() for name, value in none.items()})


def test_k3_estimates_the_divergence_from_the_engine_to_the_trainer():
    """The tokens are the engine's: the exact expectation over its distribution is KL(engine || trainer)."""
    engine, trainer = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).log_softmax(1)
    expected = (engine.exp() * (engine - trainer)).sum()
    mean = sum(engine[v].exp() * mismatch(trainer[v : v + 1], engine[v : v + 1])["mismatch/k3_sum"] for v in range(5))
    torch.testing.assert_close(mean, expected, **EXACT)


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
        torch.testing.assert_close(sum(part[name] for part in parts), whole[name], **EXACT)
    assert max(part["mismatch/max"] for part in parts) == whole["mismatch/max"]
