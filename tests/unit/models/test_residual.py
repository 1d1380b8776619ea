"""The addition of a module's output to the residual against megatron-core's function, which it replaces."""

import pytest
import torch

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

from megatron_grpo.models import layer_specs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_as_megatron_core_computes_it(dtype, with_bias, fused):
    output, residual, bias = torch.randn(3, 5, 1, 8, dtype=dtype).requires_grad_().unbind(0)
    bias = bias[0, 0] if with_bias else None
    values, gradients = [], []
    for function in layer_specs.bias_dropout_add, get_bias_dropout_add:
        values.append(function(True, fused)((output, bias), residual, 0.0))
        of = [output, residual, bias] if with_bias else [output, residual]
        gradients.append(torch.autograd.grad(values[-1], of, torch.full_like(values[-1], 0.3)))
    assert torch.equal(*values) and values[0].dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_megatron_cores_function_is_called_for_a_bias_and_for_dropout_only(monkeypatch):
    calls = []
    monkeypatch.setattr(layer_specs, "get_bias_dropout_add", lambda *kind: lambda *arguments: calls.append(arguments))
    add, x = layer_specs.bias_dropout_add(True, True), torch.ones(2, 1, 4)
    add((x, None), x, 0.0)
    assert calls == []
    add((x, x), x, 0.0)
    add((x, None), x, 0.1)
    assert len(calls) == 2
