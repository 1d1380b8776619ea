"""The tokens of a pack that a rank holds under sequence parallelism."""

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.parallel.zigzag import Int64


def own_tokens[Tokens: (torch.Tensor, Int64)](config: TransformerConfig, values: Tokens) -> Tokens:
    """Return this rank's slice ``[t / tp, ...]`` of per-token ``values`` ``[t, ...]`` of a pack.

    The slice is contiguous. Without sequence parallelism ``values`` is returned unchanged.
    """
    if not config.sequence_parallel:
        return values
    part = len(values) // parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return values[rank * part : (rank + 1) * part]
