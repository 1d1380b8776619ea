"""The optimizer's state in a checkpoint, in a form that can be loaded with any other parallel configuration.

megatron-core names the state's tensors after the model's weights, so tensors need no conversion. This module divides
them among the ranks of a distributed optimizer, and arranges the values that are not tensors, which depend on the
parallel configuration.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.planner import SavePlan

from megatron_grpo.patches import megatron_core as core
from megatron_grpo.utils.errors import GrpoError

FULLY_RESHARDABLE = "fully_reshardable"  # megatron-core's name of this form of the distributed optimizer's state


def check(directory: Path, common: dict, metadata: dict, optimizer) -> None:
    """Raise GrpoError when the optimizer state is absent or of another kind; without a stored kind, check nothing."""
    kind = metadata.get("distrib_optim_sharding_type", FULLY_RESHARDABLE)
    if kind != FULLY_RESHARDABLE:
        raise GrpoError(
            f"{directory} has the distributed optimizer's state as {kind}, which only the same parallel "
            "configuration can load: save it in Megatron-LM with --dist-ckpt-optim-fully-reshardable, or reset Adam "
            "with --no-load-optim"
        )
    if "optimizer_type" not in common:  # written by Megatron-LM
        return
    stored, built = common["optimizer_type"], type_name(optimizer)
    if stored is None:
        raise GrpoError(
            f"{directory} holds weights only, no optimizer state to resume from: "
            "give the directory as --pretrained-checkpoint, or add --finetune"
        )
    if stored != built:
        raise GrpoError(
            f"{directory} was written with {stored}, this run has {built}: give the same --optimizer, "
            "--use-distributed-optimizer, --bf16 and --fp16 as before, or --no-load-optim to start without its state"
        )


def type_name(optimizer) -> str | None:
    """Return what determines the form of the state: megatron-core's class of the (first) optimizer, and SGD."""
    if optimizer is None:
        return None
    first = _optimizers(optimizer)[0]
    return type(first).__name__ + (" of SGD" if first.config.optimizer == "sgd" else "")


def _optimizers(optimizer) -> list:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def state_to_save(optimizer, model_state: dict, metadata: dict) -> dict:
    """Return the optimizer's sharded state for the model's sharded state."""
    _create_state(optimizer)
    return optimizer.sharded_state_dict(model_state, metadata=metadata)


def state_to_load(optimizer, model_state: dict, metadata: dict) -> dict:
    """Return the state to be filled from a checkpoint and passed to `set_loaded`."""
    _create_state(optimizer)
    return optimizer.sharded_state_dict(model_state, is_loading=True, metadata=metadata)


def _create_state(optimizer) -> None:
    """Create the moments, which do not exist before the first update.

    megatron-core has no function for those of SGD, and calls it nevertheless when it loads.
    """
    for part in _optimizers(optimizer):
        if part.init_state_fn is None and part.optimizer is not None and part.config.optimizer == "sgd":
            part.init_state_fn = _create_momentum
        if part.init_state_fn is not None:  # None when this rank has no parameter of this optimizer
            part.init_state_fn(part.optimizer, part.config)


def _create_momentum(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Create the momentum of SGD, 0: the first update then has the gradient alone, as without one."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if config.sgd_momentum else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def set_loaded(optimizer, state: dict) -> None:
    """Set the optimizer's state to the filled state of `state_to_load`."""
    optimizer.load_state_dict(state)


def plain_values(request: dict, stored: dict) -> dict:
    """Return the values of the optimizer's state that are not tensors, in this rank's arrangement.

    Hyper-parameters are those of the current flags; step count and loss scale are the ``stored`` ones. The arrangement
    differs between ranks, and only rank 0's is stored: megatron-core builds a separate optimizer for experts whose
    gradients are averaged over other ranks (EP > 1, or ETP other than TP), and none on a pipeline stage without
    experts. Without this function, a run with another arrangement would not find the stored values.
    """
    _, plain = extract_matching_values(request, lambda v: isinstance(v, (ShardedBase, LocalNonpersistentObject)))
    steps = [*_values(stored, "step"), *_values(stored, "common_step")]  # common_step: torch's own Adam
    for group in itertools.chain(*_values(plain, "param_groups")):
        if steps:  # none before the first update
            group["step"] = int(max(steps))
    for scaler in _values(plain, "grad_scaler"):
        scaler.update(next(_values(stored, "grad_scaler"), {}))
    return plain


def _values(state: dict | list, name: str) -> Iterator[Any]:
    """Yield every value with this key in nested dicts and lists."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if key == name:
            yield value
        elif isinstance(value, (dict, list)):
            yield from _values(value, name)


class ShardedOptimizer(DistributedOptimizer):
    """megatron-core's distributed optimizer; every rank saves and loads its own shards of the state, without copies.

    megatron-core would first gather the state of a whole data-parallel group in the host memory of each of its ranks,
    and read all of it there again: 12 bytes for each parameter of the pipeline stage and tensor-parallel rank, several
    times over, on every rank. It also misplaces state that follows the padding of a bucket. The files hold the same
    tensors under the same names, divided otherwise.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if hasattr(self.optimizer, "state_is_in_place"):
            # megatron-core takes only the hyper-parameters from Adam's state dict, and gives Adam its own tensors back.
            self.optimizer.state_is_in_place = True

        # megatron-core gives Adam the float32 parameters of a group first, but numbers them as they come: beside
        # parameters of 16 bits (A_log of a gated delta net) the state of one would be taken for that of another.
        of_rank = hasattr(self, "model_fp32_groups")  # a rank may have no parameter of this optimizer
        groups = zip(self.model_fp32_groups, self.model_float16_groups, strict=True) if of_rank else ()
        for group, (whole, halves) in enumerate(groups):
            for place, parameter in enumerate([*whole, *halves]):
                self.model_param_group_index_map[parameter] = group, place

    def sharded_state_dict(self, *args, **kwargs):
        """Extend megatron-core's method by leaving out its collection of garbage after the gathering.

        Here nothing is gathered, and a collection over all objects of the program takes longer than the copies of a
        background save.
        """
        with core.COLLECTOR.replaced(SimpleNamespace(collect=lambda: 0)):
            return super().sharded_state_dict(*args, **kwargs)

    def sharded_param_state_fully_reshardable(self, model_sharded_state_dict, is_loading=False, metadata=None):
        """Return this rank's shards of main parameters and moments."""
        return _sharded_state(self, model_sharded_state_dict)

    def load_parameter_state_from_fully_reshardable(self, state_dict):
        """Complete a load into these shards."""
        _set_state(self, state_dict)


def _sharded_state(part: DistributedOptimizer, model_state: dict) -> list[dict]:
    """Return this rank's shards of main parameters and moments, as slices of the whole tensors of the model."""
    entries, _ = extract_sharded_tensors_and_factories(model_state)
    of_parameter = {entry.data: entry for entry in nested_values(entries)}
    rows = []
    for parameter, begin in _parameters(part):
        tensors = _state_tensors(part, parameter)
        shards = [
            shard
            for name, tensor in tensors.items()
            for shard in _slices(of_parameter[parameter], f"optimizer.state.{name}", tensor, begin)
        ]
        # The shards are views of the tensors: a load fills these.
        rows.append({"shards": shards, "tensors": LocalNonpersistentObject(tensors)})
    return rows


@torch.no_grad()
def _set_state(part: DistributedOptimizer, loaded: list[dict]) -> None:
    """Complete a load: convert the tensors that are copies of the state back to its dtype."""
    for (parameter, _), row in zip(_parameters(part), loaded, strict=True):
        tensors = row["tensors"]
        if not _is_precision_aware(part):
            part._set_main_param_and_optimizer_states(parameter, tensors)
            continue
        held = _precision_aware_state(part, parameter)[1]
        for name, tensor in tensors.items():  # one by one, because each needs a copy on the device
            if tensor is not held[name]:
                part._set_main_param_and_optimizer_states(parameter, {name: tensor.to(parameter.device)})
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        part.optimizer._sync_hdo_state_to_sub_optimizers()


def _parameters(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Yield (parameter, first position of this rank's shard in the flat parameter) for each shard of this rank."""
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start


def _state_tensors(part: DistributedOptimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return main parameter (``param``) and moments of this rank's shard, flat: the state's own tensors.

    Only state that is stored with a scale (float16, FP8) is converted, to float32 copies on the host. megatron-core
    would also copy state in bfloat16, on the device; here it is converted where it is written or read (`SavePlanner`).
    """
    if not _is_precision_aware(part):
        found = part._get_main_param_and_optimizer_states(parameter)
        return {name: tensor.detach() for name, tensor in found.items() if name != "step"}  # param_groups have the step
    shard, held = _precision_aware_state(part, parameter)
    adam_name = {"param": "master_param"}
    return {
        name: tensor
        if type(tensor) is torch.Tensor and tensor.dtype != torch.float16
        else part.optimizer.get_unscaled_state(shard, adam_name.get(name, name)).cpu()
        for name, tensor in held.items()
    }


def _is_precision_aware(part: DistributedOptimizer) -> bool:
    """Return whether Transformer Engine's Adam holds the main parameters (--use-precision-aware-optimizer)."""
    aware = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return aware and not isinstance(part.optimizer, HybridDeviceOptimizer)


def _precision_aware_state(
    part: DistributedOptimizer, parameter: torch.nn.Parameter
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return Adam's own parameter and its state as Adam holds it, under megatron-core's names."""
    group, place = part.model_param_group_index_map[parameter]
    shard = part.optimizer.param_groups[group]["params"][place]
    state = dict(part.optimizer.state[shard])
    state["param"] = state.pop("master_param")
    return shard, state


class SavePlanner(MCoreSavePlanner):
    """megatron-core's planner, which declares the optimizer's state as float32 where the optimizer holds bfloat16.

    The writers convert every tensor to its declared dtype on the host, so a save needs no memory on the device.
    """

    def create_local_plan(self) -> SavePlan:
        """Return this rank's items."""
        plan = super().create_local_plan()
        for item in plan.items:
            data = item.tensor_data
            if data is not None and "optimizer.state." in item.index.fqn and data.properties.dtype == torch.bfloat16:
                data.properties.dtype = torch.float32
        return plan


def _slices(
    entry: ShardedTensor | ShardedTensorFactory, prefix: str, shard: torch.Tensor, begin: int
) -> Iterator[ShardedTensor]:
    """Yield the slices of whole tensors that a flat shard of a parameter consists of; their data are views of it.

    ``entry`` places the parameter in the checkpoint; a factory places its parts in different tensors, or in different
    positions of one (gate and up). ``begin`` is the first position of ``shard`` in the flat parameter.
    """
    places: list[tuple[int, ShardedTensor]] = [(0, entry)]
    if isinstance(entry, ShardedTensorFactory):
        blank = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
        parts = nested_values(entry.build_fn(entry.key, blank, entry.replica_id, None))
        places = [(part.data.storage_offset(), part) for part in parts]
        assert all(part.data.is_contiguous() for _, part in places), entry.key
    for position, whole in places:
        size = math.prod(whole.local_shape)
        low, high = max(begin, position), min(begin + len(shard), position + size)
        leading = whole.prepend_axis_num
        for offset, shape in boxes(whole.local_shape, low - position, high - position):
            at = low - begin
            low += math.prod(shape)
            inner = (there + here for there, here in zip(whole.global_offset[leading:], offset, strict=True))
            shape = (1,) * leading + shape
            yield ShardedTensor(
                key=f"{prefix}.{whole.key}",
                data=shard[at : low - begin].view(shape),
                dtype=shard.dtype,
                local_shape=shape,
                global_shape=whole.global_shape,
                global_offset=(*whole.global_offset[:leading], *inner),
                axis_fragmentations=None,  # no regular grid
                replica_id=(*whole.replica_id[:2], 0),  # only this data-parallel rank has it
                allow_shape_mismatch=whole.allow_shape_mismatch,
            )


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes (offset, shape) that the positions ``start`` to ``stop`` of a flattened tensor consist of.

    The boxes follow each other in the flattened tensor: there are at most 2 n - 1 for n dimensions.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows

    def within_row(index: int, begin: int, end: int):
        for offset, inner in boxes(shape[1:], begin - index * row, end - index * row):
            yield (index, *offset), (1, *inner)

    if first > last:
        yield from within_row(last, start, stop)
        return
    yield from within_row(first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from within_row(last, last * row, stop)
