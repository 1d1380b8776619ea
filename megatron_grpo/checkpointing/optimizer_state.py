"""What a checkpoint holds of the optimizer, in a form that loads into any other layout.

megatron-core names the state's tensors after the model's weights, so they find their places themselves. Corrected here
are where its distributed optimizer looks for them, and the values that are no tensors: each layout arranges its own.
"""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

from megatron_grpo.utils.errors import GrpoError

FULLY_RESHARDABLE = "fully_reshardable"  # megatron-core's word for that form of the distributed optimizer's state


def check(directory: Path, common: dict, metadata: dict, optimizer) -> None:
    """Refuse an optimizer state that is absent or of another kind, where the checkpoint says which kind it is."""
    kind = metadata.get("distrib_optim_sharding_type", FULLY_RESHARDABLE)
    if kind != FULLY_RESHARDABLE:
        raise GrpoError(
            f"{directory} has the distributed optimizer's state as {kind}, which is tied to the layout that wrote it: "
            "write it by Megatron-LM with --dist-ckpt-optim-fully-reshardable, or start Adam anew with --no-load-optim"
        )
    if "optimizer_type" not in common:  # written by Megatron-LM
        return
    stored, built = common["optimizer_type"], type_name(optimizer)
    if stored is None:
        raise GrpoError(
            f"{directory} holds weights only, there is no optimizer to resume: "
            "give it as --pretrained-checkpoint, or add --finetune"
        )
    if stored != built:
        raise GrpoError(
            f"{directory} was written with {stored}, this run has {built}: give the same --use-distributed-optimizer, "
            "--bf16 and --fp16 as before, or --no-load-optim to start Adam anew"
        )


def type_name(optimizer) -> str | None:
    """megatron-core's class of the (first) optimizer: what decides the layout of its state."""
    return None if optimizer is None else type(_optimizers(optimizer)[0]).__name__


def _optimizers(optimizer) -> list:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def state_to_save(optimizer, model_state: dict, metadata: dict) -> dict:
    """The optimizer's sharded state, beside the sharded state of the model."""
    for part in _optimizers(optimizer):
        if part.init_state_fn is not None:  # None where this rank has no parameter of the part's
            part.init_state_fn(part.optimizer, part.config)  # a run that saves before its first update has none yet
    with _positions_without_padding(optimizer):
        return optimizer.sharded_state_dict(model_state, metadata=metadata)


def state_to_load(optimizer, model_state: dict, metadata: dict) -> dict:
    """The same as a request, to be filled from a checkpoint and given to ``optimizer.load_state_dict``."""
    with _positions_without_padding(optimizer):
        return optimizer.sharded_state_dict(model_state, is_loading=True, metadata=metadata)


def plain_values(request: dict, stored: dict) -> dict:
    """The plain values of the optimizer's state as this rank arranges them: hyper-parameters are those of the present
    flags, the step count and the loss scale those ``stored``.

    Each rank has its own arrangement, and rank 0's is stored. megatron-core makes an optimizer of their own for experts
    whose gradients are averaged over other ranks than the rest's (EP > 1, or ETP other than TP), and none on a pipeline
    stage without experts; where that differs between the two runs, it would not find its values again.
    """
    _, plain = extract_matching_values(request, lambda v: isinstance(v, (ShardedBase, LocalNonpersistentObject)))
    steps = [*_values(stored, "step"), *_values(stored, "common_step")]  # the latter from torch's own Adam
    for group in itertools.chain(*_values(plain, "param_groups")):
        if steps:  # none before the first update
            group["step"] = int(max(steps))
    for scaler in _values(plain, "grad_scaler"):
        scaler.update(next(_values(stored, "grad_scaler"), {}))
    return plain


def _values(state: dict | list, name: str) -> Iterator[Any]:
    """What nested dicts and lists hold under a name."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if key == name:
            yield value
        elif isinstance(value, (dict, list)):
            yield from _values(value, name)


@contextlib.contextmanager
def _positions_without_padding(optimizer) -> Iterator[None]:
    """Correct where megatron-core 0.16.1 looks for a parameter's state in the distributed optimizer.

    It strings a buffer's buckets together without the padding at their ends, but cuts parameters out at positions that
    count it: with several buckets (``--overlap-grad-reduce``) it would store other numbers than the state's.
    """
    buffers = [buffer for part in _optimizers(optimizer) for buffer in getattr(part, "buffers", [])]
    maps = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        paddings = (bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets)
        before = [0, *itertools.accumulate(paddings)]
        buffer.param_index_map = {
            parameter: (start - before[bucket], end - before[bucket], bucket)
            for parameter, (start, end, bucket) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, index_map in zip(buffers, maps, strict=True):
            buffer.param_index_map = index_map
