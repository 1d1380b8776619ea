"""Experts of an engine's tokens, as ``Completion.routed_experts`` has them (--router-replay-mode R3)."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_grpo.models.config import moe_layers
from megatron_grpo.utils.errors import GrpoError

FEW = 64  # more choices than these are not all of the first expert
NOT_REPORTED = (
    "--router-replay-mode R3: the engine does not report its choice of experts with the kernels that it uses here: "
    "give R2"
)


def of_moe_layers(args, reported: npt.NDArray[np.integer] | None, tokens: int) -> npt.NDArray[np.int16]:
    """Return ``Completion.routed_experts`` of ``tokens`` routed tokens.

    ``reported``: an engine's ``[tokens, layers, topk]``, which includes dense layers, or the same numbers flat.
    """
    if reported is None:
        raise GrpoError(NOT_REPORTED)
    shape = (tokens, args.num_layers, args.moe_router_topk)
    if reported.shape not in (shape, (math.prod(shape),)):
        raise GrpoError(
            f"--router-replay-mode R3: the engine returned experts of the shape {list(reported.shape)} for {tokens} "
            f"routed tokens, {args.num_layers} layers and {args.moe_router_topk} experts of each token: give it the "
            "same model"
        )
    experts = reported.reshape(shape)[:, np.flatnonzero(moe_layers(args))]
    # The buffers of vLLM and SGLang hold zeros where a kernel does not report its choice.
    several = args.moe_router_topk > 1
    if (experts[..., 0] == experts[..., 1]).any() if several else experts.size > FEW and not experts.any():
        raise GrpoError(NOT_REPORTED)
    wrong = experts[(experts < 0) | (experts >= args.num_experts)]
    if wrong.size:
        raise GrpoError(
            f"--router-replay-mode R3: the engine reports the expert {wrong[0]}, and the trainer's layers have "
            f"{args.num_experts}: give it the same model, without redundant experts"
        )
    return experts.astype(np.int16)


def check_every_layer(experts: Sequence[npt.NDArray[np.int16]]) -> None:
    """Raise GrpoError if a layer has only zeros in all completions of a batch; their ``routed_experts``.

    One token's zero can be a choice where each token has one expert.
    """
    if experts and not np.any([(of_one > 0).any(axis=(0, 2)) for of_one in experts], axis=0).all():
        only = " (or the router of a layer chooses the first expert alone)" if experts[0].shape[2] == 1 else ""
        raise GrpoError(NOT_REPORTED + only)
