"""The trainer's tensors leave the device while an engine generates there, and come back bit for bit.

Everything is done to storages, the memory behind tensors: one is copied to the host and resized to nothing, later
resized back and filled. Whatever looks into it (parameters, megatron-core's buckets and shards, an optimizer's views)
stays the object that it is, so nothing here depends on the class of the optimizer.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_grpo.utils.cpu_backend import device
from megatron_grpo.utils.errors import GrpoError

# The host's memory is taken in blocks of this many bytes, and storages are laid through them end to end. torch rounds a
# request for page-locked memory up to a power of two (64 GiB for 33): of such blocks only the end of the last is waste.
BLOCK_BYTES = 1 << 28


class Transfer(NamedTuple):
    """What a move did: the device's bytes that it gave up or took back, how many of them it copied, the seconds."""

    size: int
    copied: int
    seconds: float


class Offloader:
    """Moves ``weights`` (the parameters), ``gradients`` and ``optimizer_state`` (float32 main parameters, moments) of
    the wrapped chunks ``model`` and their optimizer to the host's page-locked memory and back.

    Gradients are not kept: they come back as zeros, which is how an update begins. A storage that holds two kinds, such
    as the parameters of a float32 model, which the optimizer updates in place, moves with the first of the three. Left
    where they are: what is on the host already (``--optimizer-cpu-offload``), and tensors of subclasses, such as
    Transformer Engine's of 8 bits.

    Nothing may touch a tensor that is out: there is no memory behind it, and most kernels that read it end the process
    (a segmentation fault on a CPU, an illegal memory access on a GPU; matrix products raise RuntimeError). What needs
    some of the kinds at another time than the rest, such as the weights for a sync, has an Offloader for each.
    """

    def __init__(
        self, model: list[DistributedDataParallel], optimizer, weights: bool, gradients: bool, optimizer_state: bool
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.weights, self.gradients, self.optimizer_state = weights, gradients, optimizer_state
        self.is_out = False
        self._copied: list[tuple[torch.UntypedStorage, int]] = []  # with the bytes that each has on the device
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._blocks: list[torch.Tensor] = []

    @property
    def host_bytes(self) -> int:
        """Host memory held for the copies; it is taken by the first move out and kept."""
        return len(self._blocks) * BLOCK_BYTES

    @torch.no_grad()
    def to_host(self) -> Transfer:
        """Give up the device's memory; without effect when out already. Raises GrpoError when the host has too little.

        Under ``--overlap-param-gather`` no gather may be under way (``training.parameters_complete`` finishes it).
        """
        if self.is_out:
            return Transfer(0, 0, 0.0)
        start = time.perf_counter()
        torch.cuda.synchronize()  # also streams other than this one, where collectives run, must be done
        if self.gradients:
            self.optimizer.zero_grad()  # those that lie outside the buffers: float32 copies of 16-bit gradients
        self._collect()
        for data, host in self._pieces():
            host.copy_(data, non_blocking=True)
        torch.cuda.synchronize()
        for storage, _ in self._copied + self._dropped:
            storage.resize_(0)
        torch.cuda.empty_cache()  # else the memory stays with this allocator, and the engine has its own
        self.is_out = True
        return self._transfer(start)

    @torch.no_grad()
    def to_device(self) -> Transfer:
        """Take the device's memory back and fill it; without effect when it is there. GrpoError when it is taken."""
        if not self.is_out:
            return Transfer(0, 0, 0.0)
        start = time.perf_counter()
        try:
            for storage, size in self._copied + self._dropped:
                storage.resize_(size)
        except torch.OutOfMemoryError as error:
            size = self._transfer(start).size / 2**30
            raise GrpoError(
                f"the trainer gave up {size:.2f} GiB of the GPU for the engine's turn, and cannot take it all back: is "
                "there an inference server that still holds it? End that, and go on with --load"
            ) from error
        for data, host in self._pieces():
            data.copy_(host, non_blocking=True)
        for storage, _ in self._dropped:
            _bytes_of(storage).zero_()
        torch.cuda.synchronize()
        self.is_out = False
        return self._transfer(start)

    def _collect(self) -> None:
        """Find what is to move. Each time anew: an optimizer makes its moments in its first step, a load replaces
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
                # Empty are shards of which another rank has all, and what another Offloader has moved.
                if storage.nbytes() == 0 or storage.data_ptr() in seen:
                    continue
                seen.add(storage.data_ptr())
                if wanted:
                    moving.append((storage, storage.nbytes()))

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(bytes on the device, their place on the host) of all that is copied, cut where blocks end."""
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
    for chunk in model:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            assert group.param_gather_handle is None, "a gather of parameters is under way: finish it first"
        yield from chunk.parameters()


def gradient_tensors(model: list[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    for chunk in model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield buffer.grad_data


def optimizer_tensors(optimizer) -> Iterator[torch.Tensor]:
    """Main parameters and moments; megatron-core has one optimizer for dense parameters and one for experts'."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:  # this rank has no such parameters
            continue
        # Under --optimizer-cpu-offload the share that stays on the device has optimizers of its own.
        for inner in (part.optimizer, *getattr(part.optimizer, "sub_optimizers", ())):
            for group in inner.param_groups:
                yield from group["params"]
            for state in inner.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's content as uint8 ``[bytes]``."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_block(held: int) -> torch.Tensor:
    try:
        return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=device().type == "cuda")
    except RuntimeError as error:
        raise GrpoError(
            f"--offload-*: the host gave this process {held / 2**30:.2f} GiB of page-locked memory and no more: "
            "offload less, or take a host with more memory or a higher limit of locked memory (ulimit -l)"
        ) from error
