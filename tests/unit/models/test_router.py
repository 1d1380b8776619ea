"""The router's float32 logits of bf16 tokens, beside float64."""

import pytest
import torch

import pretrain_grpo  # noqa: F401  first: it prepares for machines without a GPU
from megatron_grpo.models.router import Float32Logits

TOKENS, HIDDEN, EXPERTS = 96, 256, 24


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_logits_and_gradients(scale: float, frozen: bool):
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
    weight = torch.randn(EXPERTS, HIDDEN).bfloat16().requires_grad_(not frozen)
    upstream = torch.randn(TOKENS, EXPERTS) * scale
    got = Float32Logits.apply(x, weight)
    got.backward(upstream)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    want = exact[0] @ exact[1].T
    want.backward(upstream.double())
    assert got.dtype == torch.float32 and x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=4e-5)
    # Each is the exact gradient, rounded to bf16: at most 2^-8 of it away.
    torch.testing.assert_close(x.grad.double(), exact[0].grad, rtol=2**-7.9, atol=1e-3 * scale)
    if frozen:
        assert weight.grad is None
    else:
        torch.testing.assert_close(weight.grad.double(), exact[1].grad, rtol=2**-7.9, atol=1e-3 * scale)
