"""Offloading of the trainer's tensors to host memory while an engine generates; the restored tensors are bit-identical.

This module moves storages, the memory behind tensors. A storage is copied to the host and resized to 0 bytes; later it
is resized back and filled. All tensors that share the storage (parameters, megatron-core's buckets and shards, views of
an optimizer) stay the same objects, so this module does not depend on the class of the optimizer.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_grpo.models.fp8_training import free_fp8_weights
from megatron_grpo.models.fp8_weight import stored
from megatron_grpo.utils.cpu_backend import device
from megatron_grpo.utils.errors import GrpoError

# Size of the host's memory blocks in bytes; storages fill the blocks without gaps. torch rounds a request for
# page-locked memory up to a power of two (64 GiB for 33), so only the end of the last block is unused.
BLOCK_BYTES = 1 << 28


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
    """

    def __init__(
        self, model: list[DistributedDataParallel], optimizer, weights: bool, gradients: bool, optimizer_state: bool
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.weights, self.gradients, self.optimizer_state = weights, gradients, optimizer_state
        self.is_out = False
        self._copied: list[tuple[torch.UntypedStorage, int]] = []  # (storage, its bytes on the device)
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._blocks: list[torch.Tensor] = []

    @property
    def host_bytes(self) -> int:
        """Host memory of the copies in bytes, allocated by the first move and never freed."""
        return len(self._blocks) * BLOCK_BYTES

    @torch.no_grad()
    def to_host(self) -> Transfer:
        """Offload the tensors and free their device memory; no-op if offloaded. GrpoError if host memory is too small.

        With ``--overlap-param-gather`` no gather may be running (``forward.parameters_complete`` completes it).
        """
        if self.is_out:
            return Transfer(0, 0, 0.0)
        start = time.perf_counter()
        torch.cuda.synchronize()  # all streams, because collectives run on their own
        if self.gradients:
            self.optimizer.zero_grad()  # gradients outside the buffers: float32 copies of 16-bit gradients
        free_fp8_weights(self.model)
        self._collect()
        for data, host in self._slices():
            host.copy_(data, non_blocking=True)
        torch.cuda.synchronize()
        for storage, _ in self._copied + self._dropped:
            storage.resize_(0)
        torch.cuda.empty_cache()  # returns the memory from torch's allocator to the device, for the engine's allocator
        self.is_out = True
        return self._transfer(start)

    @torch.no_grad()
    def to_device(self) -> Transfer:
        """Allocate the device memory again and fill it; no-op if allocated. GrpoError if device memory is too small."""
        if not self.is_out:
            return Transfer(0, 0, 0.0)
        start = time.perf_counter()
        try:
            for storage, size in self._copied + self._dropped:
                storage.resize_(size)
        except torch.OutOfMemoryError as error:
            size = self._transfer(start).size / 2**30
            raise GrpoError(
                f"the trainer freed {size:.2f} GiB of the GPU for the engine, and cannot allocate all of it again: end "
                "the inference server or program that still holds memory there, and resume with --load"
            ) from error
        for data, host in self._slices():
            data.copy_(host, non_blocking=True)
        for storage, _ in self._dropped:
            _bytes_of(storage).zero_()
        torch.cuda.synchronize()
        self.is_out = False
        return self._transfer(start)

    def _collect(self) -> None:
        """Find the storages to move.

        This runs before every move, because an optimizer creates its moments in its first step, and a load replaces
        them.
        """
        self._copied, self._dropped = [], []
        kinds = (
            (self.weights, self._copied, weight_tensors(self.model)),
            (self.gradients, self._dropped, gradient_tensors(self.model)),
            (self.optimizer_state, self._copied, optimizer_tensors(self.optimizer)),
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

    def _slices(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (bytes on the device, bytes on the host) of all copied storages, split at the ends of host blocks."""
        position = 0
        for storage, size in self._copied:
            data, begin = _bytes_of(storage), 0
            while begin < size:
                block, offset = divmod(position, BLOCK_BYTES)
                if block == len(self._blocks):
                    self._blocks.append(_host_block(self.host_bytes))
                count = min(size - begin, BLOCK_BYTES - offset)
                yield data[begin : begin + count], self._blocks[block][offset : offset + count]
                begin, position = begin + count, position + count

    def _transfer(self, start: float) -> Transfer:
        copied, dropped = (sum(size for _, size in storages) for storages in (self._copied, self._dropped))
        return Transfer(copied + dropped, copied, time.perf_counter() - start)


def weight_tensors(model: list[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    """Yield the parameters of the wrapped chunks; of those in 8 bits, the tensors inside them."""
    for chunk in model:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            assert group.param_gather_handle is None, "a gather of parameters is running: complete it first"
        for parameter in chunk.parameters():
            yield from stored(parameter)


def gradient_tensors(model: list[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    """Yield megatron-core's gradient buffers."""
    for chunk in model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield buffer.grad_data


def optimizer_tensors(optimizer) -> Iterator[torch.Tensor]:
    """Yield main parameters and moments; megatron-core has one optimizer for dense parameters and one for experts."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:  # this rank has no such parameters
            continue
        # With --optimizer-cpu-offload, the share on the device has its own optimizers.
        for inner in (part.optimizer, *getattr(part.optimizer, "sub_optimizers", ())):
            for group in inner.param_groups:
                for parameter in group["params"]:
                    yield from stored(parameter)
            for state in inner.state.values():
                for value in filter(torch.is_tensor, state.values()):
                    yield from stored(value)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the content of a storage as uint8 ``[bytes]``."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_block(held: int) -> torch.Tensor:
    try:
        return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=device().type == "cuda")
    except RuntimeError as error:
        raise GrpoError(
            f"--offload-*: this process can allocate only {held / 2**30:.2f} GiB of page-locked host memory: "
            "offload less, or use a host with more memory or a higher limit of locked memory (ulimit -l)"
        ) from error
