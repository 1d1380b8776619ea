"""Functions over lists of tensors against megatron-core's loops, to the last bit."""

import pytest
import torch

from megatron_grpo.patches import cpu_backend

cpu_backend.install()  # before megatron.core is imported

import megatron.core.optimizer
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from megatron_grpo.training import multi_tensor

SHAPES = [(7, 5), (3,), (2, 4, 3), (0,), (1,), (129, 33)]


def tensors(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def test_norm():
    arguments = 65536, torch.zeros(1), [tensors()], False
    (got, _), (want, _) = multi_tensor.norm(*arguments), local_multi_tensor_l2_norm(*arguments)
    assert got.shape == want.shape == (1,) and got.dtype == want.dtype
    assert torch.equal(got, want) and want > 0


@pytest.mark.parametrize("factor", [0.37, 1.0])
def test_scale_in_place(factor):
    got, want = tensors(), tensors()
    multi_tensor.scale(65536, None, [got, got], factor)
    local_multi_tensor_scale(65536, None, [want, want], factor)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    multi_tensor.scale(65536, None, [empty := [], empty], factor)  # nothing has a gradient


def test_scale_to_other_tensors_of_another_dtype():
    source, got, want = tensors(), tensors(torch.float16, 1), tensors(torch.float16, 1)
    multi_tensor.scale(65536, None, [source, got], 1.0)
    local_multi_tensor_scale(65536, None, [source, want], 1.0)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_copy_rounds_as_the_loop_does():
    source, got, want = tensors(), tensors(torch.bfloat16, 1), tensors(torch.bfloat16, 1)
    multi_tensor.copy(this=source, that=got, overflow_buf=None)
    for a, b in zip(source, want, strict=True):
        b.copy_(a)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    multi_tensor.copy([], [])  # of a rank without parameters of this dtype


def test_norm_and_scale_of_apex_or_transformer_engine_stay(monkeypatch):
    marker = object()
    for module, name in (
        (clip_grads, "l2_norm_impl"),
        (clip_grads, "multi_tensor_scale_impl"),
        (optimizer, "_multi_tensor_copy_this_to_that"),
        (megatron.core.optimizer, "DistributedOptimizer"),
    ):
        monkeypatch.setattr(module, name, marker)
    multi_tensor.install()
    assert clip_grads.l2_norm_impl is clip_grads.multi_tensor_scale_impl is marker
    assert optimizer._multi_tensor_copy_this_to_that is multi_tensor.copy
    assert megatron.core.optimizer.DistributedOptimizer is multi_tensor.DistributedOptimizer
