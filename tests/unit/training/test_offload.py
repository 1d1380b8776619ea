"""Moves to the host and back without a model: how much moves, which order is safe, and what is refused."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_offloader import LateOffloader  # first: it prepares for machines without a GPU

from megatron_grpo.training import offload
from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.offload import Offloader, needed_by_engine, optimizer_tensors, weight_tensors
from megatron_grpo.utils.errors import GrpoError

SIZES = (3, 1, 40, 7)


def adam(steps: int = 1) -> tuple[SimpleNamespace, list[torch.Tensor]]:
    """An optimizer as megatron-core wraps it, after ``steps``, and its parameters."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=torch.optim.Adam(parameters, lr=0.1))])
    for number in range(steps):
        step(optimizer, parameters, number)
    return optimizer, parameters


def step(optimizer, parameters: list[torch.Tensor], number: int) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    optimizer.chained_optimizers[0].optimizer.step()


class Device:
    """The free memory of a device on which the tensors of an optimizer lie; a block is freed as a whole."""

    def __init__(self, optimizer, tensors_in_block: int):
        self.storages = [tensor.untyped_storage() for tensor in optimizer_tensors(optimizer)]
        self.blocks = [self.storages[i : i + tensors_in_block] for i in range(0, len(self.storages), tensors_in_block)]
        self.sizes = [sum(storage.nbytes() for storage in block) for block in self.blocks]

    def free(self) -> int:
        whole = [not any(storage.nbytes() for storage in block) for block in self.blocks]
        return sum(size for size, empty in zip(self.sizes, whole, strict=True) if empty)


@given(st.integers(-10, 700), st.integers(1, 4))
def test_as_much_moves_as_the_engine_needs(wanted, tensors_in_block):
    optimizer, _ = adam()
    device = Device(optimizer, tensors_in_block)
    total = sum(device.sizes)
    offloader = Offloader([], optimizer, weights=False, gradients=False, optimizer_state=True)
    with mock.patch.object(offload, "free_bytes", device.free):
        out = offloader.to_host(wanted)
        gone = [storage.nbytes() == 0 for storage in device.storages]
        assert device.free() >= wanted or all(gone)
        if tensors_in_block == 1:  # without the last one it would be too little
            largest = max(4 * max(SIZES), 1)
            assert out.copied == device.free() <= min(max(wanted, 0) + largest, total)
        assert any(gone) == (wanted > 0)
    assert offloader.to_device()[:2] == out[:2]


@given(st.lists(st.sampled_from(["out", "a part out", "in", "in later", "wait", "step"]), max_size=12))
def test_no_order_of_moves_changes_an_update(moves):
    """The tensors are those of an optimizer that never moves, once they are on the device and have been waited for."""
    optimizer, parameters = adam()
    plain, its_parameters = adam()
    with LateOffloader([], optimizer, weights=False, gradients=False, optimizer_state=True) as offloader:
        for number, move in enumerate([*moves, "in later", "step"]):
            match move:
                case "out":
                    offloader.to_host()
                case "a part out":
                    with mock.patch.object(offload, "free_bytes", Device(optimizer, 2).free):
                        offloader.to_host(100)  # in two rounds
                case "in":
                    offloader.to_device()
                case "in later":
                    offloader.to_device(background=True)
                case "wait":
                    offloader.complete()
                case "step" if not offloader.is_out:
                    step(optimizer, parameters, number)
                    step(plain, its_parameters, number)
            if move in ("in", "wait", "step") and not offloader.is_out:
                pairs = zip(optimizer_tensors(optimizer), optimizer_tensors(plain), strict=True)
                assert all(torch.equal(one, other) for one, other in pairs), move


def test_a_copy_that_fails_ends_the_step_that_waits_for_it():
    optimizer, parameters = adam()
    offloader = Offloader([], optimizer, weights=False, gradients=False, optimizer_state=True)
    offloader.to_host()
    with mock.patch.object(offload, "_fill", side_effect=RuntimeError("CUDA error")):
        offloader.to_device(background=True)
    with pytest.raises(RuntimeError, match="CUDA error"):
        step(optimizer, parameters, 1)


def test_what_the_engine_needs():
    """0.3 of a GPU of 1,000 bytes; 0.03 are left beside the awake engine, and twice as much before it wakes."""
    gpu = mock.patch.multiple("torch.cuda", is_available=lambda: True, mem_get_info=lambda: (1, 1000))
    asleep = parse_args("--sleep-level 2 --vllm-gpu-memory-utilization 0.3".split())
    with_weights = SimpleNamespace(device_bytes=lambda: (100, 200))
    assert needed_by_engine(asleep, None, margins=2) == math.inf  # a CPU
    with gpu:
        assert needed_by_engine(asleep, None, margins=2) == pytest.approx(360)
        assert needed_by_engine(asleep, with_weights, margins=1) == pytest.approx(230)
        awake = parse_args(["--sleep-level", "0"])
        assert needed_by_engine(awake, None, margins=1) == math.inf
        assert needed_by_engine(awake, with_weights, margins=1) == 0


def test_a_device_with_enough_memory_keeps_all():
    """torch's cache, too: to empty it takes as long as to allocate the memory of the next update again."""
    optimizer, _ = adam()
    offloader = Offloader([], optimizer, weights=False, gradients=False, optimizer_state=True)
    with mock.patch.object(offload, "free_bytes", lambda: 100), mock.patch.object(torch.cuda, "empty_cache") as emptied:
        assert offloader.to_host(100) == (0, 0, 0.0)
        assert not emptied.called and not offloader.is_out
        assert offloader.to_host(101).size
        assert emptied.called and offloader.is_out
    offloader.to_device()


def test_memory_that_somebody_has_taken():
    offloader = Offloader([], None, weights=True, gradients=False, optimizer_state=False)
    storage = mock.Mock(**{"resize_.side_effect": torch.OutOfMemoryError("CUDA out of memory")})
    offloader.is_out, offloader._copied = True, [(storage, 3 * 2**30)]
    with pytest.raises(GrpoError, match=r"3.00 GiB .* inference server .* --load"):
        offloader.to_device()


def test_tensors_in_8_bits_are_the_tensors_inside_them():
    class Wrapper(torch.Tensor):  # as Transformer Engine's: without memory of its own
        def get_data_tensors(self):
            return self.values, None

    moment = torch.Tensor._make_subclass(Wrapper, torch.empty(4, device="meta"))
    moment.values = torch.zeros(4, dtype=torch.uint8)
    weight, plain = torch.zeros(4), torch.zeros(4)
    state = {weight: {"exp_avg": moment, "exp_avg_sq": plain, "step": 3}}
    inner = SimpleNamespace(param_groups=[{"params": [weight]}], state=state)
    found = list(optimizer_tensors(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])))
    assert [id(tensor) for tensor in found] == [id(weight), id(moment.values), id(plain)]
    chunk = SimpleNamespace(bucket_groups=[], expert_parallel_bucket_groups=[], parameters=lambda: [moment, weight])
    assert [id(tensor) for tensor in weight_tensors([chunk])] == [id(moment.values), id(weight)]
