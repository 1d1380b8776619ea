"""Which of a pack's tokens a rank has between the tensor-parallel layers."""

from typing import TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.parallel.zigzag import Int64

Tokens = TypeVar("Tokens", torch.Tensor, Int64)


def own_tokens(config: TransformerConfig, values: Tokens) -> Tokens:
    """Of something of each of a pack's tokens ``[t, ...]`` what is this rank's: under sequence parallelism a contiguous
    part, ``[t / tp, ...]``, else all.
    """
    if not config.sequence_parallel:
        return values
    part = len(values) // parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return values[rank * part : (rank + 1) * part]
