"""Weights from trainer rank 0 to all engine ranks: one broadcast for each bucket of tensors.

Both sides know the names, dtypes and shapes of all tensors in the order of the stream (`describe`), so that only bytes
travel. No rank holds more than a bucket beside its model.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_grpo.utils import progress
from megatron_grpo.utils.device import device
from megatron_grpo.weights.stream import Described

Weights = Iterator[tuple[str, torch.Tensor]]
BUCKET_BYTES = 256 * 2**20
ALIGNMENT = 16  # bytes; a tensor begins where its dtype can be read


def to_json(described: Sequence[Described]) -> list[list]:
    """Return descriptions as JSON values."""
    return [[name, str(dtype).removeprefix("torch."), list(shape)] for name, dtype, shape in described]


def from_json(values: Sequence[Sequence]) -> list[Described]:
    """Undo `to_json`."""
    return [Described(name, getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in values]


def buckets(described: Sequence[Described], limit: int = BUCKET_BYTES) -> Iterator[list[Described]]:
    """Yield consecutive tensors of at most ``limit`` bytes, or a larger one alone."""
    bucket: list[Described] = []
    held = 0
    for tensor in described:
        if bucket and held + _bytes(tensor) > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += _bytes(tensor)
    if bucket:
        yield bucket


def send(weights: Weights, described: Sequence[Described], group: dist.ProcessGroup) -> None:
    """Broadcast ``weights`` from rank 0 of ``group``."""
    for bucket in buckets(described):
        flat = torch.zeros(sum(map(_bytes, bucket)), dtype=torch.uint8, device=_device_of(group))
        for expected, part in zip(bucket, flat.split(list(map(_bytes, bucket))), strict=True):
            name, tensor = next(weights)
            assert (name, tensor.shape) == (expected.name, expected.shape), f"{name} is sent in place of {expected}"
            _view(part, expected).copy_(tensor)
        _broadcast(flat, group)
    for name, _ in weights:  # iterating is collective: reach the end
        raise AssertionError(f"{name} is not described")


def receive(described: Sequence[Described], group: dist.ProcessGroup) -> Weights:
    """Yield the weights that rank 0 of ``group`` sends; the receiver must iterate to the end."""
    for bucket in buckets(described):
        sizes = list(map(_bytes, bucket))
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=_device_of(group))
        _broadcast(flat, group)
        for expected, part in zip(bucket, flat.split(sizes), strict=True):
            yield expected.name, _view(part, expected)


def _device_of(group: dist.ProcessGroup) -> torch.device | str:
    return "cpu" if isinstance(group, dist.ProcessGroupGloo) else device()


def _broadcast(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([flat], options).wait()
    progress.advance()


def _bytes(tensor: Described) -> int:
    size = tensor.shape.numel() * tensor.dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def _view(part: torch.Tensor, tensor: Described) -> torch.Tensor:
    return part[: tensor.shape.numel() * tensor.dtype.itemsize].view(tensor.dtype).view(tensor.shape)
