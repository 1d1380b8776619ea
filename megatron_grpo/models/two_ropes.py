"""Two rotary position embeddings in one model: for layers with a window and for layers without (Gemma 3)."""

from argparse import Namespace

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.transformer.utils import is_layer_window_attention


class TwoRopes(torch.nn.Module):
    """Two rotary embeddings, stacked along the first axis: the model's and that of layers with a window.

    The latter has the base ``--rotary-base-local`` and no scaling. Both are one tensor, because activation
    recomputation passes on single tensors only.
    """

    def __init__(self, whole: RotaryEmbedding, args: Namespace):
        super().__init__()
        self.whole = whole
        self.local = RotaryEmbedding(args.kv_channels, args.rotary_percent, rotary_base=args.rotary_base_local)
        self.get_rotary_seq_len = whole.get_rotary_seq_len

    def forward(self, *args, **kwargs) -> torch.Tensor:
        """Return ``[2, s, 1, 1, d]``."""
        return torch.stack([self.whole(*args, **kwargs), self.local(*args, **kwargs)])


def with_two_ropes(attention: type) -> type:
    """Return a subclass of a self-attention that selects the rotary embedding of its layer from `TwoRopes`."""

    class TwoRopesAttention(attention):
        def forward(self, hidden_states, attention_mask, rotary_pos_emb=None, **more):
            config = self.config
            local = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
            return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb[int(local)], **more)

    return TwoRopesAttention
