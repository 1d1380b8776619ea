"""Transformer Engine's Adam with steps of few parameters at a time, on a stand-in that steps as it does."""

import pytest
import torch

from megatron_grpo.training import fused_adam


class StandIn(torch.optim.Optimizer):
    """Adam with moments in bf16. ``copied`` has the elements of each group that Transformer Engine would copy."""

    def __init__(self, params, moments=torch.bfloat16):
        super().__init__(params, {"lr": 0.1})
        self.name_to_dtype_map = {"exp_avg": moments, "exp_avg_sq": moments}
        self.copied = []  # elements of each call

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            self.copied.append(sum(param.numel() for param in group["params"]))
            for param in group["params"]:
                state = self.state.setdefault(param, {})
                first = state.get("exp_avg", torch.zeros_like(param)).float().lerp(param.grad, 0.1)
                second = state.get("exp_avg_sq", torch.zeros_like(param)).float().lerp(param.grad.square(), 0.01)
                first_sum, second_sum = 1 - 0.9 ** group["step"], 1 - 0.99 ** group["step"]  # of the weights so far
                param -= group["lr"] * (first / first_sum) / ((second / second_sum).sqrt() + 1e-8)
                state["exp_avg"], state["exp_avg_sq"] = first.bfloat16(), second.bfloat16()


def trained(kind, sizes, steps=3, **options):
    draws = torch.Generator().manual_seed(0)
    groups = [[torch.nn.Parameter(torch.randn(size, generator=draws)) for size in group] for group in sizes]
    optimizer = kind([{"params": group} for group in groups], **options)
    for _ in range(steps):
        for param in (param for group in groups for param in group):
            param.grad = torch.randn(param.shape, generator=draws)
        optimizer.step()
    return optimizer, [param.detach() for group in groups for param in group]


def test_same_numbers_with_less_copied_at_a_time(monkeypatch):
    monkeypatch.setattr(fused_adam, "PART", 100)
    sizes = [[40, 50, 30, 250, 10], [], [99, 1, 1]]
    whole, expected = trained(StandIn, sizes)
    parts, found = trained(fused_adam.in_parts(StandIn), sizes)
    assert max(whole.copied) == 380
    assert parts.copied == 3 * [90, 30, 250, 10, 100, 1]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    steps = [[group.get("step") for group in optimizer.param_groups] for optimizer in (whole, parts)]
    assert steps == [[3, None, 3]] * 2
    assert [len(group["params"]) for group in parts.param_groups] == [5, 0, 3]


def test_moments_in_float32_need_no_parts(monkeypatch):
    monkeypatch.setattr(fused_adam, "PART", 100)
    optimizer, _ = trained(fused_adam.in_parts(StandIn), [[40, 50, 30]], steps=1, moments=torch.float32)
    assert optimizer.copied == [120]


def test_groups_survive_a_failed_step(monkeypatch):
    monkeypatch.setattr(fused_adam, "PART", 1)
    optimizer, params = trained(fused_adam.in_parts(StandIn), [[2, 3]], steps=1)
    params = optimizer.param_groups[0]["params"]
    params[1].grad = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] is params
