"""Gradient clip of multi-token-prediction layers by their own norm, so that the policy's update is as without them.

Their loss gives the policy no gradient (`PolicyModel._mtp_log_probs`). A clip by one norm of all gradients would still
make the policy's step smaller.
"""

import math

import torch
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

from megatron_grpo.models.forward import Model

# megatron-core's optimizers copy the attribute `shared` to their main parameters, and leave parameters out of the
# gradient norm where it is true.
_MARK = "multi-token prediction"


def trains_mtp(config) -> bool:
    """Return whether multi-token-prediction layers are trained (``config``: megatron-core's TransformerConfig)."""
    return bool(config.mtp_num_layers) and config.mtp_loss_scaling_factor > 0


def mark_mtp(model: Model) -> None:
    """Exclude the chunks' multi-token-prediction layers from the gradient norm. Call before the optimizer is built."""
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if ".mtp." in f".{name}":
                parameter.shared = _MARK


def is_mtp(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "shared", None) == _MARK


def clip_mtp(optimizer, policy_norm: float) -> float:
    """Clip the gradients of multi-token-prediction layers to --clip-grad by their own norm; return that. Collective.

    They have been multiplied with the factor of the policy's norm, which this takes back.
    """
    if not math.isfinite(policy_norm):  # the update is skipped
        return policy_norm
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    squares, all_grads = 0.0, []
    for part in parts:
        own = [p for p in part.get_parameters() if is_mtp(p)]
        # Megatron-core's precision-aware optimizer has decoupled gradients.
        grads = [p.grad if p.grad is not None else getattr(p, "decoupled_grad", None) for p in own]
        known = [(p, grad) for p, grad in zip(own, grads, strict=True) if grad is not None]
        tp_group = getattr(part, "tp_group", None)
        once = [grad for p, grad in known if param_is_not_tensor_parallel_duplicate(p, tp_group)]
        norm = get_grad_norm_fp32(once, grad_stats_parallel_group=part.get_grad_stats_parallel_group())
        squares += float(norm) ** 2
        all_grads += [grad for _, grad in known]
    clip = optimizer.config.clip_grad
    given = _factor(clip, policy_norm)
    norm = squares**0.5 / given
    if all_grads and math.isfinite(norm):
        torch._foreach_mul_(all_grads, _factor(clip, norm) / given)
    return norm


def _factor(clip: float, norm: float) -> float:
    """Return megatron-core's factor of a clip; 0: no clip."""
    return min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
