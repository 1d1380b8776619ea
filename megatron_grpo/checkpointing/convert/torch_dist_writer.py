"""Writer of the tensors in a megatron-core checkpoint (`torch_dist`), one by one and without a model.

A checkpoint can be loaded with any parallel configuration; the one that it is written for determines only the chunks.
torch reads whole chunks, so a checkpoint for tensor-parallel size n has the shards of n ranks as chunks, and each rank
reads only its own. With size 1 each parameter is one chunk.
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_grpo.checkpointing import data_files
from megatron_grpo.checkpointing.checkpoint import CONTENT_METADATA
from megatron_grpo.checkpointing.convert.torch_dist import Place, written_places
from megatron_grpo.utils.errors import GrpoError, InputError
from megatron_grpo.weights.parameter_mapping import Read, Weight


def tensor_parallel_size(args: Namespace, weight: Weight) -> int:
    """Return the size of the tensor parallelism that shards a weight: that of experts, or that of all others."""
    return args.tensor_model_parallel_size if weight.expert is None else args.expert_tensor_parallel_size


def write(
    directory: Path,
    args: Namespace,
    weights: Sequence[Weight],
    mine: Sequence[Weight],
    read: Read,
    dtype: torch.dtype,
    progress: Callable[[int], Any] = lambda size: None,
) -> None:
    """Write a checkpoint with weights only into an empty directory.

    Each tensor is built from Hugging Face tensors just before it is written.

    `weights`: the table. `mine`: the part of the table that this process writes. `read`: see Weight.fill. `progress`:
    called with each number of bytes written. Collective if torch.distributed is initialized. Raises GrpoError when
    reading or writing fails.
    """
    planner = _Planner(list(_cuts(args, written_places(args, weights), mine, dtype)), read, progress)
    try:
        torch_checkpoint.save(
            {}, storage_writer=data_files.Writer(directory), planner=planner, no_dist=not dist.is_initialized()
        )
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        if isinstance(cause, InputError):
            raise cause from error
        raise GrpoError(f"checkpoint {directory} cannot be written (rank {rank}): {cause}") from error


# The common state.
_WEIGHTS_ONLY = {
    "checkpoint_version": 3.0,
    "iteration": 0,
    "extra_state": {},
    "optimizer_type": None,
    "content_metadata": CONTENT_METADATA,
}


class _Cut(NamedTuple):
    """Lines [first, last) of a parameter, and the item of torch's save plan that writes them."""

    weight: Weight
    first: int
    last: int
    item: WriteItem


def _cuts(args: Namespace, places: dict[str, Place], weights: Sequence[Weight], dtype: torch.dtype) -> Iterator[_Cut]:
    """Yield the chunks of each parameter: tensor-parallel shards, with gate and up of a shard in separate chunks."""
    for weight in weights:
        place, shape, axis = places[weight.name], weight.shard_shape(1), weight.lines_axis
        parts = _number_of_cuts(weight, args)
        lines = shape[axis] // parts
        for first in range(0, shape[axis], lines):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[axis], sizes[axis] = first, lines
            chunk = ChunkStorageMetadata(
                offsets=torch.Size((*place.numbers, *offsets)), sizes=torch.Size((*(1 for _ in place.numbers), *sizes))
            )
            properties, size = TensorProperties(dtype=weight.dtype or dtype), torch.Size((*place.sizes, *shape))
            item = WriteItem(
                MetadataIndex(place.key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            yield _Cut(weight, first, first + lines, item)


def _number_of_cuts(weight: Weight, args: Namespace) -> int:
    if weight.axis is None:
        return 1
    size = tensor_parallel_size(args, weight)
    lines = [shape[weight.axis] for shape in weight.part_shapes]
    whole, ranks = (weight.layout(lines, n, weight.dims) for n in (1, size))
    # If the shards are not contiguous in the full tensor, each one has an equal share of every part of it (gate, up).
    return size if whole == ranks else size * len(whole)


class _Planner(DefaultSavePlanner):
    """Save planner that builds each chunk when torch's writer requests it, and holds one parameter at a time."""

    def __init__(self, cuts: Sequence[_Cut], read: Read, progress: Callable[[int], Any]):
        super().__init__(flatten_state_dict=False)
        self.cuts = {cut.item.index: cut for cut in cuts}
        self.read, self.progress = read, progress
        self.held: tuple[Weight, Tensor] | None = None

    def create_local_plan(self) -> SavePlan:
        items = [cut.item for cut in self.cuts.values()]
        if self.is_coordinator:
            items.append(WriteItem(data_files.COMMON_STATE_INDEX, WriteItemType.BYTE_IO))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Build the global plan without the default check for overlapping chunks: minutes with ten thousand experts."""
        return create_default_global_save_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            content = io.BytesIO()
            torch.save([_WEIGHTS_ONLY], content)  # a list of shards, as megatron-core writes
            return content
        weight, first, last, item = self.cuts[write_item.index]
        assert item.tensor_data is not None
        if self.held is None or self.held[0] is not weight:
            self.held = None  # frees the last one before the next is allocated
            whole = torch.empty(weight.shard_shape(1), dtype=item.tensor_data.properties.dtype)
            weight.fill(whole, 0, 1, self.read)
            self.held = (weight, whole)
        whole = self.held[1]
        part = whole.narrow(weight.lines_axis, first, last - first)
        if part.shape != whole.shape:
            part = part.clone(memory_format=torch.contiguous_format)  # torch.save would write the full tensor
        self.progress(part.nbytes)
        return part.view(item.tensor_data.chunk.sizes)
