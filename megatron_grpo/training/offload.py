"""Offloading of the trainer's tensors to host memory while an engine generates; the restored tensors are bit-identical.

This module moves storages, the memory behind tensors. A storage is copied to the host and resized to 0 bytes; later it
is resized back and filled. All tensors that share the storage (parameters, megatron-core's buckets and shards, views of
an optimizer) stay the same objects, so this module does not depend on the class of the optimizer.
"""

import math
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_grpo.estimate.memory import MARGIN, engine_share
from megatron_grpo.models.fp8_training import free_fp8_weights
from megatron_grpo.models.fp8_weight import stored
from megatron_grpo.rollout.arguments import has_colocated_vllm
from megatron_grpo.rollout.engine import TrainersEngine
from megatron_grpo.utils.device import device
from megatron_grpo.utils.errors import GrpoError

# Size of the host's memory blocks in bytes; storages fill the blocks without gaps. torch rounds a request for
# page-locked memory up to a power of two (64 GiB for 33), so only the end of the last block is unused.
BLOCK_BYTES = 1 << 28
# The host clears new memory at about 2 GiB a second and thread: several blocks are allocated at a time.
ALLOCATING_THREADS = 8

Storages = list[tuple[torch.UntypedStorage, int]]  # with their bytes on the device
Slices = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (bytes on the device, bytes on the host)


class Transfer(NamedTuple):
    """Bytes that a move freed or allocated on the device, the number of copied bytes, and the seconds of the move."""

    size: int
    copied: int
    seconds: float


class Offloader:
    """Offloading of tensors of the wrapped chunks ``model`` and their optimizer to page-locked host memory and back.

    ``weights`` (parameters), ``gradients`` and ``optimizer_state`` (float32 main parameters, moments) select the kinds
    of tensors. Gradients are not copied: they return as zeros, because every update begins with zeros. A storage with
    tensors of two kinds moves with the first of the three; an example is a float32 model, in which the optimizer
    updates the parameters in place. Of a tensor in 8 bits the tensors inside it move. Tensors on the host
    (``--optimizer-cpu-offload``) and of other subclasses do not move.

    An offloaded tensor has no memory: most kernels that read it end the process (a segmentation fault on a CPU, an
    illegal memory access on a GPU; matrix products raise RuntimeError). Use a separate Offloader for a kind that moves
    at a different time, such as the weights, which a weight sync needs.

    The optimizer state can return in the background (``to_device``), while forward and backward passes run: they do not
    read it. The optimizer's step waits for it. Other readers, such as a save, call ``complete`` first.
    """

    def __init__(
        self, model: list[DistributedDataParallel], optimizer, weights: bool, gradients: bool, optimizer_state: bool
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.weights, self.gradients, self.optimizer_state = weights, gradients, optimizer_state
        self.is_out = False
        self._copied: Storages = []
        self._dropped: Storages = []
        self._blocks: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream()  # of copies to the device
        self._thread = ThreadPoolExecutor(max_workers=1)  # of those in the background
        self._copies: Future | None = None  # those that run
        for inner in torch_optimizers(optimizer) if optimizer_state else ():
            inner.register_step_pre_hook(lambda *_: self.complete())

    @property
    def host_bytes(self) -> int:
        """Host memory of the copies in bytes, allocated by the first move and never freed."""
        return len(self._blocks) * BLOCK_BYTES

    @torch.no_grad()
    def to_host(self, free: float = math.inf) -> Transfer:
        """Free gradients, and offload the others until ``free`` bytes of the device are free; no-op if they are.

        GrpoError if host memory is too small. With ``--overlap-param-gather`` no gather may be running
        (``forward.parameters_complete`` completes it).
        """
        if self.is_out:
            return Transfer(0, 0, 0.0)
        start = time.perf_counter()
        self.complete()
        torch.cuda.synchronize()  # all streams, because collectives run on their own
        if self.gradients:
            self.optimizer.zero_grad()  # gradients outside the buffers: float32 copies of 16-bit gradients
        free_fp8_weights(self.model)
        if free_bytes() >= free:  # torch's allocator keeps what it has cached
            return Transfer(0, 0, 0.0)
        candidates, self._dropped = self._collect()
        self._copied = []
        _release(self._dropped)
        # Small storages share blocks of torch's allocator with others, so they can free less than their bytes: repeat.
        while candidates and (missing := free - free_bytes()) > 0:
            moving: Storages = []
            while candidates and missing > 0:
                moving.append(candidates.pop(0))
                missing -= moving[-1][1]
            self._allocate(_size(self._copied) + _size(moving))
            for data, host in self._slices(moving, _size(self._copied)):
                host.copy_(data, non_blocking=True)
            torch.cuda.synchronize()
            self._copied += moving
            _release(moving)
        self.is_out = True
        return self._transfer(start)

    @torch.no_grad()
    def to_device(self, background: bool = False) -> Transfer:
        """Allocate the device memory again and fill it; no-op if filled. GrpoError if device memory is too small.

        ``background``: return after the allocation; a thread copies until ``complete``.
        """
        if not self.is_out:
            if not background:
                self.complete()
            return Transfer(0, 0, 0.0)
        start = time.perf_counter()
        try:
            for storage, size in self._copied + self._dropped:
                storage.resize_(size)
        except torch.OutOfMemoryError as error:
            gib = self._transfer(start).size / 2**30
            raise GrpoError(
                f"the trainer freed {gib:.2f} GiB of the GPU for the engine, and cannot allocate all of it again: end "
                "the inference server or program that still holds memory there, and resume with --load"
            ) from error
        for storage, _ in self._dropped:
            _bytes_of(storage).zero_()
        self._stream.wait_stream(torch.cuda.current_stream())  # whose kernels may have used the memory before
        slices = list(self._slices(self._copied, 0))
        if background:
            self._copies = self._thread.submit(_fill, slices, self._stream)
        else:
            _fill(slices, self._stream)
            torch.cuda.synchronize()
        self.is_out = False
        return self._transfer(start)

    def complete(self) -> None:
        """Wait for the copies of ``to_device``."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.result()

    def _collect(self) -> tuple[Storages, Storages]:
        """Return the storages to copy and those to drop.

        This runs before every move, because an optimizer creates its moments in its first step, and a load replaces
        them.
        """
        copied: Storages = []
        dropped: Storages = []
        kinds = (
            (self.weights, copied, weight_tensors(self.model)),
            (self.gradients, dropped, gradient_tensors(self.model)),
            (self.optimizer_state, copied, optimizer_tensors(self.optimizer)),
        )
        seen = set()
        for wanted, moving, tensors in kinds:
            for tensor in tensors:
                if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != device().type:
                    continue
                storage = tensor.untyped_storage()
                # Empty storages: shards that are entirely on another rank, and storages moved by another Offloader.
                if storage.nbytes() == 0 or storage.data_ptr() in seen:
                    continue
                seen.add(storage.data_ptr())
                if wanted:
                    moving.append((storage, storage.nbytes()))
        return copied, dropped

    def _allocate(self, size: int) -> None:
        """Allocate host memory until there are ``size`` bytes."""
        missing = -(-size // BLOCK_BYTES) - len(self._blocks)
        try:
            with ThreadPoolExecutor(ALLOCATING_THREADS) as threads:
                self._blocks += threads.map(_host_block, [device()] * missing)
        except RuntimeError as error:
            raise GrpoError(
                f"--offload-*: this process can allocate less than {size / 2**30:.2f} GiB of page-locked host memory: "
                "offload less, or use a host with more memory or a higher limit of locked memory (ulimit -l)"
            ) from error

    def _slices(self, storages: Storages, position: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the slices of ``storages``, from byte ``position`` of the host's blocks on, split at ends of blocks."""
        for storage, size in storages:
            data, begin = _bytes_of(storage), 0
            while begin < size:
                block, offset = divmod(position, BLOCK_BYTES)
                count = min(size - begin, BLOCK_BYTES - offset)
                yield data[begin : begin + count], self._blocks[block][offset : offset + count]
                begin, position = begin + count, position + count

    def _transfer(self, start: float) -> Transfer:
        copied, dropped = _size(self._copied), _size(self._dropped)
        return Transfer(copied + dropped, copied, time.perf_counter() - start)


def needed_by_engine(args, engine: TrainersEngine | None, margins: int) -> float:
    """Return the bytes of the device that must be free for the engine to wake (None: to start), with so many margins.

    Infinite if only the engine knows its memory, and on a CPU; 0 for colocated vLLM that never sleeps.
    """
    share = engine_share(args)
    if not torch.cuda.is_available():
        return math.inf
    if engine is not None and has_colocated_vllm(args) and not args.sleep_level:
        return 0
    if share is None:
        return math.inf
    awake = 0 if engine is None else engine.device_bytes()[0]
    return (share + margins * MARGIN) * torch.cuda.mem_get_info()[1] - awake


def free_bytes() -> int:
    """Return the free bytes of the device; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if device().type == "cuda" else 0


def _fill(slices: Slices, stream: torch.cuda.Stream) -> None:
    """Copy from the host to the device. At most one block is queued: small copies of other streams wait behind it."""
    if device().type == "cuda":
        torch.cuda.set_device(stream.device)  # a new thread has the first GPU
    queued = 0
    with torch.cuda.stream(stream):
        for data, host in slices:
            data.copy_(host, non_blocking=True)
            queued += len(host)
            if queued >= BLOCK_BYTES:
                stream.synchronize()
                queued = 0
    stream.synchronize()


def _release(storages: Storages) -> None:
    """Free the memory of ``storages``, and return it from torch's allocator to the device, for the engine's."""
    for storage, _ in storages:
        storage.resize_(0)
    torch.cuda.empty_cache()


def _size(storages: Storages) -> int:
    return sum(size for _, size in storages)


def weight_tensors(model: list[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    """Yield the parameters of the wrapped chunks; of those in 8 bits, the tensors inside them."""
    for chunk in model:
        wrapped = isinstance(chunk, DistributedDataParallel)  # not with --eval-only
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups if wrapped else ():
            assert group.param_gather_handle is None, "a gather of parameters is running: complete it first"
        for parameter in chunk.parameters():
            yield from stored(parameter)


def gradient_tensors(model: list[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    """Yield megatron-core's gradient buffers."""
    for chunk in (chunk for chunk in model if isinstance(chunk, DistributedDataParallel)):
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield buffer.grad_data


def optimizer_tensors(optimizer) -> Iterator[torch.Tensor]:
    """Yield main parameters and moments; megatron-core has one optimizer for dense parameters and one for experts."""
    for outer in torch_optimizers(optimizer):
        # With --optimizer-cpu-offload, the share on the device has its own optimizers.
        for inner in (outer, *getattr(outer, "sub_optimizers", ())):
            for group in inner.param_groups:
                for parameter in group["params"]:
                    yield from stored(parameter)
            for state in inner.state.values():
                for value in filter(torch.is_tensor, state.values()):
                    yield from stored(value)


def torch_optimizers(optimizer) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers inside megatron-core's; None is of a rank that has no such parameters."""
    if optimizer is None:  # with --eval-only
        return []
    return [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the content of a storage as uint8 ``[bytes]``."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_block(where: torch.device) -> torch.Tensor:
    """Return a new block of host memory, page-locked if ``where`` is a GPU.

    The pages are touched first: cudaHostAlloc would clear them in one thread, under a lock of the driver.
    """
    block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    if where.type == "cuda":
        torch.cuda.set_device(where)  # a new thread has the first GPU
        block.zero_()
        runtime, address = torch.cuda.cudart(), block.data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, BLOCK_BYTES, 0)))
        weakref.finalize(block, runtime.cudaHostUnregister, address).atexit = False
    return block
