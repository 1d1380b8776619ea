"""Layers of multi-token prediction (arXiv:2412.19437, section 2.2) over packs."""

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.utils import make_viewless_tensor


class FurtherTokensLayer(MultiTokenPredictionLayer):
    """megatron-core's layer, given the tokens that are 1, 2, ... places after each token, ``[n, t]``, as input ids.

    megatron-core's own shifts the tokens within each sequence of the pack, one after the other, and exchanges those at
    the borders between context-parallel ranks. With shared prompts the next token can be in another sequence.
    """

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding,
        hidden_states: torch.Tensor,
        packed_seq_params=None,
        padding_mask=None,
    ):
        """Return (tokens of the layers that follow, position ids, mask, embeddings of the next tokens, hidden states).

        Neither embeddings nor hidden states get a gradient: ``mtp_detach_heads``.
        """
        embedded = embedding(input_ids=input_ids[:1], position_ids=position_ids).detach()
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        if not hidden_states.requires_grad:  # recomputation needs one input with a gradient
            hidden_states.requires_grad_(True)
        return input_ids[1:], position_ids, padding_mask, embedded, hidden_states
