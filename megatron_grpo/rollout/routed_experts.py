"""Experts of an engine's tokens, as ``Completion.routed_experts`` has them (--router-replay-mode R3)."""

import numpy as np
import numpy.typing as npt

from megatron_grpo.models.config import moe_layers
from megatron_grpo.utils.errors import GrpoError


def of_moe_layers(args, reported: npt.NDArray[np.integer] | None) -> npt.NDArray[np.int16]:
    """Return ``Completion.routed_experts`` from an engine's ``[tokens, layers, topk]``, which includes dense layers."""
    experts = None if reported is None else reported[:, np.flatnonzero(moe_layers(args))]
    # The buffers of vLLM and SGLang hold zeros where a kernel does not report its choice.
    if experts is None or ((experts[..., 0] == experts[..., 1]).any() if experts.shape[2] > 1 else not experts.any()):
        raise GrpoError(
            "--router-replay-mode R3: the engine does not report its choice of experts with the kernels that it uses "
            "here: give R2"
        )
    wrong = experts[(experts < 0) | (experts >= args.num_experts)]
    if wrong.size:
        raise GrpoError(
            f"--router-replay-mode R3: the engine reports the expert {wrong[0]}, and the trainer's layers have "
            f"{args.num_experts}: give it the same model, without redundant experts"
        )
    return experts.astype(np.int16)
