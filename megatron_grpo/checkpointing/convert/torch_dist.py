"""Reader of the tensors in a megatron-core checkpoint (`torch_dist`), one by one and without a model.

A checkpoint stores global tensors under keys. Each tensor is split into chunks, in the files of the ranks that wrote
them. Identical layers share a key, and so do experts: `decoder.layers.self_attention.linear_qkv.weight` has the layers
as its first axis. Layers that differ have separate keys with the layer's number; experts may have, too (`place_of`).

The reader works for every parallel configuration of the writer, which affects only the chunks.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from megatron_grpo.checkpointing import data_files
from megatron_grpo.checkpointing.checkpoint_directory import check_recurrent_layers, damaged
from megatron_grpo.utils.errors import GrpoError, InputError
from megatron_grpo.weights.model_weights import FUSED_NORMS
from megatron_grpo.weights.parameter_mapping import Weight

_LAYER = re.compile(r"((decoder|mtp)\.layers)\.(\d+)\.(transformer_layer\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_TO_FUSED = {norm: fused for fused, norm in FUSED_NORMS.items()}
# Tensors of a training checkpoint that are not the model's (keys other than these hold pickled objects, not tensors).
_NON_MODEL_KEYS = re.compile(r"(chained_\d+\.)?optimizer\.")


class Place(NamedTuple):
    """Position of a parameter in a checkpoint: tensor `key`, at `numbers` of its additional first axes of `sizes`."""

    key: str
    numbers: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.key + "".join(f"[{number}]" for number in self.numbers)


def place_of(args: Namespace, name: str, layers: bool = True, experts: bool = True, fused: bool = True) -> Place:
    """Return the place of parameter `name` (a name of model_weights.table) in a checkpoint.

    `layers`, `experts`: whether all layers, all experts share a key. `fused`: whether norms have the names of
    Transformer Engine, which fuses them into the following linear layer. The keys are those
    of sharded_state_dict in megatron-core's TransformerBlock, MultiTokenPredictionBlock and SequentialMLP.
    """
    found = _LAYER.fullmatch(name)
    if not found:
        return Place(name)
    prefix, kind, number, inner, rest = found.groups()
    place = Place(f"{prefix}.{number}.")
    if layers and kind == "decoder":
        place = Place(f"{prefix}.", (int(number),), (args.num_layers,))
    key = place.key + (inner or "")
    if fused:
        rest = _TO_FUSED.get(rest, rest)
    if expert := _EXPERT.fullmatch(rest):
        number, rest = expert.groups()
        if not experts:
            return place._replace(key=f"{key}mlp.experts.experts.{number}.{rest}")
        numbers, sizes = (*place.numbers, int(number)), (*place.sizes, args.num_experts)
        return Place(f"{key}mlp.experts.experts.{rest}", numbers, sizes)
    return place._replace(key=key + rest)


def written_places(args: Namespace, weights: Sequence[Weight]) -> dict[str, Place]:
    """Return the place of each parameter in a checkpoint of the built model (names of norms: models/layer_specs.py)."""
    names = {weight.name for weight in weights}
    # As in TransformerBlock: layers share keys unless some may be of another kind than others.
    kinds = args.moe_layer_freq == 1 and args.linear_attention_freq in (None, 1)
    alike = kinds and not args.gemma4_config and not args.hybrid_layer_pattern

    def place(name: str) -> Place:
        found = _LAYER.fullmatch(name)
        rest = found[5] if found else name
        # A norm is fused only if its linear layer exists: latent attention has no linear_qkv.
        linear = _TO_FUSED.get(rest, "").replace("layer_norm_weight", "weight")
        return place_of(args, name, layers=alike, fused=name.removesuffix(rest) + linear in names)

    return {name: place(name) for name in names}


class Checkpoint:
    """Reader of a checkpoint's tensors; it reads only what is requested. GrpoError names the file and the problem."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._check_format()
        try:
            self._reader = data_files.Reader(self.directory)
            metadata = self._reader.read_metadata()
            self.tensors: dict[str, TensorStorageMetadata] = {
                key: value
                for key, value in metadata.state_dict_metadata.items()
                if isinstance(value, TensorStorageMetadata) and not _NON_MODEL_KEYS.match(key)
            }
            self._stored: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        except (OSError, EOFError, UnpicklingError, AttributeError, ImportError) as error:
            raise GrpoError(f"{self.directory / '.metadata'} cannot be read: {error!r}") from None
        check_recurrent_layers(self.directory, self.tensors)
        self._check_files()
        self._file = cache(self._map_file)
        self._chunks = cache(self._chunks_by_index)

    def megatron_lm_args(self) -> dict[str, Any]:
        """Return the arguments that Megatron-LM stored in the common state, {} when there are none."""
        return dict(vars(self._reader.common_state().get("args", Namespace())))

    def _check_format(self) -> None:
        try:
            backend = json.loads((self.directory / "metadata.json").read_text())["sharded_backend"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GrpoError(f"{self.directory / 'metadata.json'} cannot be read: {error!r}") from None
        if backend != "torch_dist":
            raise GrpoError(
                f"checkpoint {self.directory} has the format {backend!r}: save it by Megatron-LM with --ckpt-format "
                "torch_dist"
            )

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for index, info in self._stored.items():
            if index.fqn in self.tensors:
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
                if getattr(info, "transform_descriptors", None):
                    raise GrpoError(f"checkpoint {self.directory}: {index.fqn} is compressed, which is not supported")
        for name, end in ends.items():
            file = self.directory / name
            if not file.exists():
                raise GrpoError(f"checkpoint {self.directory} is damaged: {name} is missing")
            if file.stat().st_size < end:
                raise GrpoError(
                    f"checkpoint {self.directory} is damaged: {name} has {file.stat().st_size} bytes instead of {end}"
                )

    def places(self, args: Namespace, weights: Sequence[Weight]) -> dict[str, list[Place]]:
        """Return the places of each parameter, with any form of keys: one, or two (gate and up) to be concatenated.

        Raises GrpoError unless the checkpoint has exactly the model's tensors (besides the optimizer's), in the table's
        shapes.
        """
        found = {weight.name: self.find(args, weight) for weight in weights}
        claimed = {place.key for places in found.values() for place in places}
        if unclaimed := sorted(self.tensors.keys() - claimed):
            more = f" and {len(unclaimed) - 1} more" if len(unclaimed) > 1 else ""
            raise GrpoError(
                f"checkpoint {self.directory} holds {unclaimed[0]}{more}, which is not in the model family's table"
            )
        return found

    def find(self, args: Namespace, weight: Weight) -> list[Place]:
        """Return the places of one parameter, as `places`; raise GrpoError if the checkpoint lacks it."""
        for spelling in product((True, False), repeat=3):
            place = place_of(args, weight.name, *spelling)
            for endings in (("",), ("_w", "_v")):  # megatron-core's singleton_local_shards: gate and up
                places = [place._replace(key=place.key + ending) for ending in endings]
                if all(place.key in self.tensors for place in places):
                    self._check_shape(weight, places)
                    return places
        raise GrpoError(
            f"checkpoint {self.directory} lacks {place_of(args, weight.name).key} (the model's {weight.name}): its "
            "architecture is not that of its stored arguments or of --hf-config"
        )

    def _check_shape(self, weight: Weight, places: Sequence[Place]) -> None:
        rows, *columns = weight.shard_shape(1)
        for place in places:
            stored = self.tensors[place.key]
            expected = (*place.sizes, rows // len(places), *columns)
            if tuple(stored.size) != expected:
                raise GrpoError(
                    f"checkpoint {self.directory}: {place.key} has shape {tuple(stored.size)}, but the configuration "
                    f"says {expected}"
                )
            dtype = stored.properties.dtype
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise GrpoError(
                    f"checkpoint {self.directory}: {place.key} is stored as {dtype}, which is not supported: save it "
                    "in bfloat16, float16 or float32"
                )

    def read(self, places: Sequence[Place]) -> Tensor:
        """Return a full parameter on the CPU: memory-mapped if it is one chunk, else assembled from its chunks."""
        parts = [self._read_place(place) for place in places]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_place(self, place: Place) -> Tensor:
        axes = len(place.numbers)
        stored = self.tensors[place.key]
        shape = stored.size[axes:]
        chunks = self._chunks(place.key, axes)[place.numbers]
        whole: Tensor | None = None
        for chunk in chunks:
            inner = tuple(number - start for number, start in zip(place.numbers, chunk.offsets, strict=False))
            part = self._chunk(place.key, chunk)[inner]
            if part.shape == shape:
                return part
            if whole is None:
                whole = torch.empty(shape, dtype=stored.properties.dtype)
            whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets[axes:], part.shape, strict=True))] = part
        if whole is None or sum(prod(chunk.sizes[axes:]) for chunk in chunks) != prod(shape):
            raise InputError(damaged(self.directory, f"it holds only a part of {place}"))
        return whole

    def _chunks_by_index(self, key: str, axes: int) -> dict[tuple[int, ...], list[ChunkStorageMetadata]]:
        """Return, for each index of the first `axes` axes, the chunks that hold a part of it."""
        found = defaultdict(list)
        for chunk in self.tensors[key].chunks:
            ranges = [range(o, o + n) for o, n in zip(chunk.offsets[:axes], chunk.sizes[:axes], strict=True)]
            for index in product(*ranges):
                found[index].append(chunk)
        return found

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Return a chunk, memory-mapped from its file, in which torch.save wrote each chunk."""
        info = self._stored[MetadataIndex(key, chunk.offsets)]
        try:
            memory = self._file(info.relative_path)
            with open(self.directory / info.relative_path, "rb") as stream:
                view = self._reader.checked_view(stream, info)
                meta = torch.load(view, map_location="meta", weights_only=True)  # reads everything except the values
        except GrpoError as error:
            raise InputError(damaged(self.directory, str(error))) from None
        except (RuntimeError, UnpicklingError, OSError) as error:
            problem = f"{key} in {info.relative_path} cannot be read: {error}"
            raise InputError(damaged(self.directory, problem)) from None
        if meta.shape != chunk.sizes:
            shapes = f"of shape {tuple(meta.shape)}, in .metadata {tuple(chunk.sizes)}"
            raise InputError(damaged(self.directory, f"{key} in {info.relative_path} has a chunk {shapes}"))
        start = info.offset + meta.untyped_storage()._checkpoint_offset
        bytes_ = memory[start : start + meta.untyped_storage().nbytes()]
        return torch.empty(0, dtype=meta.dtype).set_(bytes_, meta.storage_offset(), meta.shape, meta.stride())

    def _map_file(self, name: str) -> torch.UntypedStorage:
        file = self.directory / name
        size = file.stat().st_size
        return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(str(file), shared=False, nbytes=size))
