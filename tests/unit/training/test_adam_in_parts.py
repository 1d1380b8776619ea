"""Transformer Engine's Adam with steps of few parameters at a time, on a stand-in that holds what it does."""

import pytest
import torch
from helpers.precision_aware import Adam

from megatron_grpo.training import fused_adam

OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
OPTIONS |= dict.fromkeys(["adam_w_mode", "master_weights", "use_decoupled_grad", "store_param_remainders"], True)


def trained(kind, sizes, steps=3, moments=torch.bfloat16):
    draws = torch.Generator().manual_seed(0)
    groups = [[torch.nn.Parameter(torch.randn(size, generator=draws)) for size in group] for group in sizes]
    dtypes = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments, "master_weight_dtype": torch.float32}
    optimizer = kind([{"params": group} for group in groups], **OPTIONS, **dtypes)
    for _ in range(steps):
        for param in (param for group in groups for param in group):
            param.decoupled_grad = torch.randn(param.shape, generator=draws)
        optimizer.step()
    return optimizer, [param.detach() for group in groups for param in group]


def test_same_numbers_with_less_copied_at_a_time(monkeypatch):
    monkeypatch.setattr(fused_adam, "PART", 100)
    sizes = [[40, 50, 30, 250, 10], [], [99, 1, 1]]
    whole, expected = trained(Adam, sizes)
    parts, found = trained(fused_adam.in_parts(Adam), sizes)
    assert max(whole.copied) == 380
    assert parts.copied == 3 * [90, 30, 250, 10, 100, 1]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    steps = [[group.get("step") for group in optimizer.param_groups] for optimizer in (whole, parts)]
    assert steps == [[3, None, 3]] * 2
    assert [len(group["params"]) for group in parts.param_groups] == [5, 0, 3]


def test_moments_in_float32_need_no_parts(monkeypatch):
    monkeypatch.setattr(fused_adam, "PART", 100)
    optimizer, _ = trained(fused_adam.in_parts(Adam), [[40, 50, 30]], steps=1, moments=torch.float32)
    assert optimizer.copied == [120]


def test_groups_survive_a_failed_step(monkeypatch):
    monkeypatch.setattr(fused_adam, "PART", 1)
    optimizer, params = trained(fused_adam.in_parts(Adam), [[2, 3]], steps=1)
    params = optimizer.param_groups[0]["params"]
    params[1].decoupled_grad = None
    with pytest.raises(AttributeError):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] is params
