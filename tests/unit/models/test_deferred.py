"""Gradients that a backward pass computes later."""

import pytest
import torch

import pretrain_grpo  # noqa: F401  first: it prepares for machines without a GPU

# isort: split
from megatron_grpo.models import expert_dispatch, experts
from megatron_grpo.models.deferred import Deferred


@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 0, 0]], ids=str)
def test_a_transfer_begins_before_the_gradient_of_the_weights(monkeypatch, counts):
    """The calls of a backward pass in their order, and the gradients of plain autograd."""
    torch.manual_seed(0)
    ends = torch.tensor(counts).cumsum(0).int()
    idle = (torch.tensor(counts) == 0).nonzero()[:, 0]
    x, weight = torch.randn(sum(counts), 4, requires_grad=True), torch.randn(3, 8, 4, requires_grad=True)
    want = torch.autograd.grad(experts.grouped_matmul(2 * x, weight, ends, idle).square().sum(), (x, weight))

    calls, product = [], torch.nn.functional.grouped_mm
    monkeypatch.setattr(experts.F, "grouped_mm", lambda a, b, **more: calls.append(a.shape[0]) or product(a, b, **more))

    def begin(grad):
        calls.append("begin")
        return lambda: calls.append("end") or 2 * grad

    of_tokens, of_weight = Deferred(), Deferred()
    tokens, late = of_tokens.node(x), of_weight.node(weight)
    sent = expert_dispatch._Transfer.apply(tokens, of_tokens, lambda x: 2 * x, begin)
    loss = experts._GroupedMatmul.apply(sent, late, ends, idle, of_weight).square().sum()
    calls.clear()
    got = torch.autograd.grad(loss, (x, weight))
    assert calls == ([sum(counts), "begin", 8, "end"] if sum(counts) else ["begin", "end"])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_frozen_weight_is_not_deferred():
    linear = torch.nn.Module()
    linear.weight, linear._deferred = torch.nn.Parameter(torch.randn(2, 3, 4), requires_grad=False), None
    experts.GroupedLinear.defer_gradient(linear)
    assert linear._deferred is None
