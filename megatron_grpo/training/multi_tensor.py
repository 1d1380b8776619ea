"""torch's functions over lists of tensors in place of megatron-core's loops over parameters.

Without Transformer Engine and apex, megatron-core computes the norm of the gradients, clips them and copies the main
parameters to the model in loops over the parameters: on a GPU one to two launches for each parameter, and for the norm
a wait for the device as well. Functions over lists launch a kernel for many parameters. With Transformer Engine or
apex, norm and clipping are theirs, and only the copies are replaced.
"""

from collections.abc import Sequence

import torch
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from megatron_grpo.checkpointing.optimizer_state import ShardedOptimizer
from megatron_grpo.patches import megatron_core as core

Tensors = list[torch.Tensor]


def norm(_chunk_size: int, _overflow, lists: Sequence[Tensors], _per_tensor: bool) -> tuple[torch.Tensor, None]:
    """Return the L2 norm of all tensors of ``lists[0]`` (float32) together, ``[1]``; in place of apex's function."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0])))[None], None


def scale(_chunk_size: int, _overflow, lists: Sequence[Tensors], factor: float) -> None:
    """Set the tensors of ``lists[1]`` to ``factor`` times those of ``lists[0]``; in place of apex's function.

    megatron-core calls it to clip gradients in place, or to copy with a factor of 1.
    """
    source, target = lists
    if target is not source:
        torch._foreach_copy_(target, source)
    if target and factor != 1.0:
        torch._foreach_mul_(target, factor)


def copy(this: Tensors, that: Tensors, overflow_buf: torch.Tensor | None = None) -> None:
    """Copy the tensors ``this`` to ``that``; the dtypes may differ."""
    if this:
        torch._foreach_copy_(that, this)


class DistributedOptimizer(ShardedOptimizer):
    """Copies this rank's shards of the main parameters by a function over lists; its name is in checkpoints."""

    def _copy_main_params_to_model_params(self):
        """Copy the shards to the buffers that the parameters of the model are views of."""
        if self.is_stub_optimizer or self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            return  # there is nothing to copy, or the optimizer copies
        kinds = (
            (self.shard_fp32_from_float16_groups, self.model_float16_groups),
            (self.shard_fp32_groups, self.model_fp32_groups),
        )
        for main_groups, model_groups in kinds:  # a call for each, because it needs tensors of one dtype
            mains = [main for group in main_groups for main in group]
            copy(mains, [self._shard_in_buffer(parameter) for group in model_groups for parameter in group])

    def _shard_in_buffer(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return this rank's part of a parameter, a view ``[n]`` of the parameter buffer."""
        part = self._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
        buffer, _, bucket = self.model_param_gbuf_map[parameter]
        return self.buffers[buffer].buckets[bucket].param_data[part.start : part.end]


def install() -> None:
    """Replace megatron-core's loops by the functions of this module, and its distributed optimizer."""
    core.COPY_PARAMETERS.install(copy)
    core.DISTRIBUTED_OPTIMIZER.install(DistributedOptimizer)
    if core.NORM.original() is local_multi_tensor_l2_norm:
        core.NORM.install(norm)
    if core.SCALE.original() is local_multi_tensor_scale:
        core.SCALE.install(scale)
