"""What the loss reports of micro-batches adds up to the metrics of an update, also what a plug-in's loss returns."""

import math
from types import SimpleNamespace

import pytest
import torch
from plugins import plugins  # noqa: F401

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron_grpo.algorithm.loss_metrics import is_extreme, report, update_metrics
from megatron_grpo.algorithm.policy_term import PolicyTerm, policy_term
from megatron_grpo.algorithm.registry import PolicyLoss, register_loss
from megatron_grpo.training import train_step
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.utils.errors import GrpoError

NAN = math.nan


def reported(log_probs, old, engine, ref, masked, **metrics):
    zero = torch.zeros_like(old)
    metrics = {f"foo/{name}": tensor for name, tensor in metrics.items()}
    policy = PolicyTerm(zero, masked, zero, masked, masked == 1, metrics)
    batch = {"ref_log_probs": ref, "rollout_log_probs": engine}
    return report(log_probs.sum(), policy, log_probs, old, 2 * masked, batch)


def test_an_update_by_hand():
    """Two micro-batches, of two tokens and of one: ratios 1, 2, 1/2; k3 of x = 0, 1, -1; strengths 1, 2, 6."""
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old = torch.tensor([-1.0, -2.0 - math.log(2), -3.0 + math.log(2)])
    engine = old - torch.tensor([0.25, NAN, -0.5])
    ref = log_probs.detach() - torch.tensor([0.0, 1.0, -1.0])
    tensors = log_probs, old, engine, ref, torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 2.0, 6.0])
    parts = [
        reported(*(tensor[part] for tensor in tensors[:-1]), strength=tensors[-1][part])
        for part in (slice(0, 2), slice(2, 3))
    ]
    assert not any(value.requires_grad for part in parts for value in part.values())
    combine = {True: max, False: lambda values: sum(values)}
    totals = {name: combine[name.endswith("/max")](part[name].item() for part in parts) for name in parts[0]}
    totals["ratio/min"] = min(part["ratio/min"].item() for part in parts)
    assert {name for name in totals if is_extreme(name)} == {"ratio/min", "ratio/max", "mismatch/max"}
    row = update_metrics(totals)
    assert row["mismatch/clipped"] == pytest.approx(2 / 3)
    assert {name: value for name, value in row.items() if not name.startswith("mismatch/")} == pytest.approx(
        {
            "loss": -6.0,
            "entropy": 4 / 3,
            "kl": (math.exp(-1) + math.exp(1) - 2) / 3,
            "clip/low": 2 / 3,
            "clip/high": 0.0,
            "clip/masked": 2 / 3,
            "foo/strength": 3.0,
            "ratio/mean": 3.5 / 3,
            "ratio/min": 0.5,
            "ratio/max": 2.0,
        }
    )
    assert row["mismatch/mean_abs"] == pytest.approx(0.375) and row["mismatch/max_abs"] == pytest.approx(0.5)


def test_an_update_without_tokens():
    row = update_metrics({name: value.item() for name, value in reported(*torch.zeros(5, 0)).items()})
    assert row == {"loss": 0, "entropy": 0, "kl": 0, "clip/low": 0, "clip/high": 0, "clip/masked": 0} | {
        "mismatch/clipped": 0,
        "ratio/mean": 0,
        "ratio/min": 1,
        "ratio/max": 1,
    }


# ---- metrics of a plug-in's loss


def term(metrics):
    register_loss("foo", aggregation="grpo")(lambda log_probs: PolicyLoss(-log_probs, metrics=metrics))
    args = parse_args(["--loss-type", "foo"])
    batch = {"advantages": torch.ones(2), "completion": torch.tensor([0, 0])}
    return policy_term(args, torch.zeros(2), torch.zeros(2), batch)


@pytest.mark.usefixtures("plugins")
def test_a_losss_metric_reaches_the_report():
    assert term({"foo/strength": torch.tensor([1.0, 2.0])}).metrics["foo/strength"].tolist() == [1, 2]


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"foo/strength": torch.ones(3)}, r"foo returned the metric 'foo/strength' of shape \(3,\) for 2 tokens"),
        ({"foo/strength": 1.0}, "foo returned the metric 'foo/strength' 1.0 for 2 tokens: return one value"),
        ({"kl": torch.ones(2)}, "a metric 'kl', .*: name it \"foo/NAME\""),
        ({"foo/strength/max": torch.ones(2)}, "not /min or /max"),
    ],
)
def test_metrics_that_cannot_be_logged(metrics, message):
    with pytest.raises(GrpoError, match=message):
        term(metrics)


def test_names_must_agree(monkeypatch):
    """Over the micro-batches of one rank, and with those of another, which is here one that reports `others`."""
    a, b = {"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0), "foo/strength": torch.tensor(3.0)}
    seen = []

    def alone(tensor, op, group):
        seen.append(tensor.clone())

    monkeypatch.setattr(train_step.parallel_state, "get_data_parallel_group", lambda **_: None)
    monkeypatch.setattr(train_step.dist, "all_reduce", alone)
    first, second = SimpleNamespace(cp_rank=0), SimpleNamespace(cp_rank=1)  # of the ranks that share a pack
    assert train_step._data_parallel_totals([first, first], [a, b]) is None
    assert train_step._data_parallel_totals([first, first], [b, b]) == {"loss": 4, "foo/strength": 6}
    assert train_step._data_parallel_totals([first, second], [b, b]) == {"loss": 2, "foo/strength": 3}
    others = seen[1]
    monkeypatch.setattr(train_step.dist, "all_reduce", lambda t, op, group: t.copy_(torch.maximum(t, others)))
    assert train_step._data_parallel_totals([first], [a]) is None
