"""What a loader of weights reads, against the elements that a copy of numbered elements takes."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.rollout.vllm import loader_trace
from megatron_grpo.rollout.vllm.loader_trace import box_of, reads, trace
from megatron_grpo.weights.transfer_plan import HfTensor

pytestmark = pytest.mark.vllm
SHAPE = (6, 4, 5)


class Model(torch.nn.Module):
    """A model with one parameter; ``load(parameter, tensor)`` is its loader."""

    def __init__(self, load):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 4), 7.0), requires_grad=False)
        self._load = load

    def load_weights(self, weights):
        for _, tensor in weights:
            self._load(self.weight, tensor)


def covered(box, shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    if box is not None:
        mask[tuple(slice(*bounds) for bounds in box)] = True
    return mask


@given(st.data())
def test_the_box_of_a_view_has_all_its_elements_and_no_others(data):
    """Views as loaders make them: parts of axes, one index of an axis, other orders of axes."""
    numbers = torch.arange(math.prod(SHAPE)).view(SHAPE)
    view, meta = numbers, torch.empty(SHAPE, device="meta")
    for axis in range(len(SHAPE)):
        first = data.draw(st.integers(0, SHAPE[axis] - 1))
        size = data.draw(st.integers(0, SHAPE[axis] - first))
        view, meta = view.narrow(axis, first, size), meta.narrow(axis, first, size)
    order = data.draw(st.permutations(range(len(SHAPE))))
    view, meta = view.permute(order), meta.permute(order)
    if view.shape[0] and data.draw(st.booleans()):
        view, meta = view[0], meta[0]
    mask = torch.zeros(SHAPE, dtype=torch.bool)
    mask.view(-1)[view.flatten()] = True
    assert torch.equal(covered(box_of(meta, SHAPE), SHAPE), mask)


@pytest.mark.parametrize(
    ("take", "rows"),
    [
        (lambda t: t[1:3].view(-1), 2),  # two axes in one
        (lambda t: t.view(3, 2, 4, 5)[:, 1], 5),  # an axis in two: up to its last row
        (lambda t: t[::2], 5),
        (lambda t: t.view(24, 5)[6:10], 2),  # rows 1 and 2, in part
    ],
)
def test_the_box_of_another_view_has_at_least_its_elements(take, rows):
    view = take(torch.arange(math.prod(SHAPE)).view(SHAPE))
    box = box_of(take(torch.empty(SHAPE, device="meta")), SHAPE)
    assert covered(box, SHAPE).flatten()[view.flatten()].all()
    assert box[0][1] - box[0][0] == rows


@pytest.mark.parametrize(
    ("load", "boxes"),
    [
        (lambda p, t: p.data.copy_(t[:4, 2:6]), [((0, 4), (2, 6))]),
        (lambda p, t: p.data[:2].copy_(t[2:4, :4]), [((2, 4), (0, 4))]),
        (lambda p, t: p.data.copy_(t.t().contiguous()[:4, :4]), [((0, 8), (0, 8))]),  # as gpt-oss's
        (lambda p, t: p.data.copy_(-torch.exp(t[4:, 4:])), [((4, 8), (4, 8))]),  # as A of Mamba
        (lambda p, t: p.data.copy_(t[:4, :4].to(p.device, torch.float64)), [((0, 4), (0, 4))]),
        (lambda p, t: p.data.copy_(torch.cat([t[:2, :4], t[6:, :4]])), [((0, 2), (0, 4)), ((6, 8), (0, 4))]),
        (lambda p, t: t[4:, :4].zero_() is None or p.data.copy_(t[4:, :4]), [((4, 8), (0, 4))]),
        (lambda p, t: p.data[0, 0].fill_(t[3, 5].item()), [((3, 4), (5, 6))]),
        (lambda p, t: p.data[3:].fill_(0), []),  # rows that pad a vocabulary
        (lambda p, t: None, []),  # an expert of another rank
    ],
)
def test_a_loader_reads_its_part_and_writes_nothing(load, boxes):
    model = Model(load)
    assert trace(model, [HfTensor("w", torch.float32, torch.Size([8, 8]))]).needs == [boxes]
    assert (model.weight == 7).all()


def test_a_loader_that_needs_values_receives_whole_tensors(monkeypatch, capsys):
    def load(parameter, tensor):
        if tensor.sum() > 0:
            parameter.data.copy_(tensor[:4, :4])

    runner = SimpleNamespace(get_model=lambda: Model(load), model_config=SimpleNamespace(quantization=None))
    monkeypatch.setattr("megatron_grpo.rollout.vllm.adapter._manager", lambda worker: None)
    worker = SimpleNamespace(model_runner=runner)
    tensors = [HfTensor("w", torch.float32, torch.Size([8, 8]))]
    assert reads(worker, tensors, ()) is None
    assert "cannot be traced" in capsys.readouterr().out
    runner.model_config.quantization = "fp8"
    assert reads(worker, tensors, ()) is None


def test_a_box_in_another_one_is_left_out():
    whole, part, other = ((0, 8), (0, 4)), ((2, 4), (0, 4)), ((6, 8), (2, 6))
    assert loader_trace._without_contained([part, whole, other, part]) == [whole, other]
