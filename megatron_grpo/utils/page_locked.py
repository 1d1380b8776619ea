"""Page-locked host memory, from which copies to a GPU are fast, of the size that is asked for.

torch's ``pin_memory`` rounds each tensor up to a power of two (64 GiB for 33), so that the weights of a model take up
to twice their size. Here many tensors share ordinary memory, which is then registered with CUDA: only pages and
alignment are lost. Blocks of powers of two, as `training/offload.py` has them, need tensors that may be split.
"""

import contextlib
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes


def starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return (first byte of each part, bytes of all parts) of parts of ``sizes`` bytes that share memory.

    Each part loses less than `ALIGNMENT` bytes.
    """
    found, end = [], 0
    for size in sizes:
        found.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return found, end


def register(data: Tensor) -> bool:
    """Page-lock the memory of a tensor of the host; return whether there is a GPU and the limit (ulimit -l) allows it.

    Call `unregister` before the memory is freed.
    """
    if not torch.cuda.is_available():
        return False
    if int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA keeps the error, and this thread's next launch raises it
        _launch()
    return False


def _launch() -> None:
    """Launch a kernel."""
    torch.zeros(1, device="cuda")


def unregister(address: int) -> None:
    """Undo `register`, after the copies that use the memory."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


class _Memory(mmap.mmap):
    """Memory of this process; a subclass, because the finalizer of a plain mmap runs after its memory is unmapped.

    It is shared with children: after a fork, a write to private memory would move it away from what the GPU reads.
    """


def host_copies(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return copies of tensors in host memory, with these dtypes; all share memory, page-locked if there is a GPU."""
    begin, size = starts([tensor.numel() * dtype.itemsize for tensor, dtype in zip(tensors, dtypes, strict=True)])
    memory = _Memory(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)  # see `_Memory`
    data = torch.frombuffer(memory, dtype=torch.uint8)  # its storage, which the copies share, keeps the memory
    if register(data):
        weakref.finalize(memory, unregister, data.data_ptr()).atexit = False
    copies = []
    for tensor, dtype, first in zip(tensors, dtypes, begin, strict=True):
        part = data[first : first + tensor.numel() * dtype.itemsize]
        copies.append(part.view(dtype).view(tensor.shape))
        copies[-1].copy_(tensor.detach(), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies
