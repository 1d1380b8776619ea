"""Host memory of the size that is asked for: the places of tensors in it, and its registration with CUDA."""

import gc
import mmap
import random

import pytest
import torch

from megatron_grpo.utils import page_locked


@pytest.mark.parametrize("seed", range(20))
def test_parts_lie_one_after_the_other_and_waste_less_than_the_alignment_each(seed):
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 2, 63, 64, 65, chance.randrange(1 << 20)]) for _ in range(chance.randrange(50))]
    begins, total = page_locked.starts(sizes)
    assert all(begin % 64 == 0 for begin in begins)
    assert all(begin + size <= after for begin, size, after in zip(begins, sizes, [*begins[1:], total], strict=False))
    assert total <= sum(sizes) + 63 * len(sizes)


def test_weights_of_a_published_shape_take_their_size():
    """Qwen3-8B in bfloat16 (36 layers of its config.json); a power of two for each tensor is 33% more."""
    hidden, mlp, kv, head = 4096, 12288, 1024, 128
    layer = [hidden * 4096, hidden * kv, hidden * kv, 4096 * hidden, *[hidden * mlp] * 3, *[hidden] * 2, *[head] * 2]
    sizes = [2 * count for count in [151936 * hidden] * 2 + layer * 36 + [hidden]]
    assert sum(sizes) == 2 * 8_190_735_360
    assert page_locked.starts(sizes)[1] < 1.00001 * sum(sizes)
    assert sum(1 << (size - 1).bit_length() for size in sizes) > 1.33 * sum(sizes)


class Cudart:
    def __init__(self):
        self.registered, self.sizes = set(), []

    def cudaHostRegister(self, address, size, flags):
        self.registered.add(address)
        self.sizes.append(size)
        return 0

    def cudaHostUnregister(self, address):
        self.registered.remove(address)


def test_copies_share_registered_memory_which_ends_with_the_last_copy(monkeypatch):
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensors = [torch.randn(33, 5), torch.arange(7), torch.tensor(2.5), torch.empty(0), torch.randn(4, 6).T]
    dtypes = [torch.bfloat16, torch.int64, torch.float32, torch.float32, torch.float32]
    copies = page_locked.host_copies(tensors, dtypes)
    for tensor, dtype, copy in zip(tensors, dtypes, copies, strict=True):
        assert copy.dtype == dtype and torch.equal(copy, tensor.to(dtype))
    size = sum(copy.nbytes for copy in copies)
    assert cudart.sizes == [copies[0].untyped_storage().nbytes()] and size <= cudart.sizes[0] <= size + mmap.PAGESIZE
    copies[1] += 1  # memory of its own
    assert torch.equal(tensors[1], torch.arange(7))
    del copy, copies[1:]
    gc.collect()
    assert cudart.registered
    copies.clear()
    gc.collect()
    assert not cudart.registered


def test_memory_that_cannot_be_page_locked_is_used(monkeypatch):
    cudart = Cudart()
    kept: list[int] = []  # by the runtime, until a launch has raised it
    cudart.cudaHostRegister = lambda *_: kept.append(2) or 2

    def launch():
        if kept:
            raise RuntimeError(f"CUDA error {kept.pop()}")

    monkeypatch.setattr(page_locked, "_launch", launch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert page_locked.host_copies([torch.ones(3)], [torch.float32])[0].tolist() == [1, 1, 1]
    launch()  # of the update that follows
