"""RMSNorm for the ``local`` layer spec, which works under sequence parallelism (megatron-core's wrapper refuses it)."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019), built as megatron-core builds its norms.

    Under sequence parallelism each tensor-parallel rank sees a part of the tokens, so the weight's gradient is a
    partial sum: the mark ``sequence_parallel`` makes megatron-core add the parts up.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel
