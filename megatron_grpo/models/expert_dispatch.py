"""The way of tokens to their experts and back, for the ``local`` layer spec with the all-gather dispatcher."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.models.row_copies import CopyRows, RowCopies, SumCopies


class LocalMoELayer(MoELayer):
    """megatron-core's layer, with `AllGatherDispatcher` for ``--moe-token-dispatcher-type allgather``."""

    def __init__(self, config: TransformerConfig, *args, pg_collection: ProcessGroupCollection | None = None, **kwargs):
        # megatron-core 0.16 gives the groups to its own class only; those of the program are the default ones.
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, *args, pg_collection=groups, **kwargs)
        if isinstance(self.token_dispatcher, MoEAllGatherTokenDispatcher):
            local = self.num_local_experts, self.local_expert_indices
            self.token_dispatcher = AllGatherDispatcher(*local, config=self.config, pg_collection=groups)


class AllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """megatron-core's dispatcher, which sums the outputs of a token's experts, and their gradients, in float32.

    Its own sums are ``scatter_add`` and the gradient of ``index_select``, in bf16 and with atomic operations.
    """

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this rank's tokens ``[k, h]`` sorted by expert, their number for each expert ``[E]``, and ``[k]``.

        The last are the probabilities. ``hidden_states`` is ``[t, h]``, ``probs`` ``[t, experts of all ranks]``.
        """
        first, tokens = self.local_expert_indices[0], len(hidden_states)
        chosen, probs = (x[:, first : first + self.num_local_experts].T for x in (self.routing_map, probs))
        tokens_per_expert = chosen.sum(1).cpu()
        places = chosen.flatten().nonzero()[:, 0]
        self.copies = RowCopies(places % tokens, tokens)
        self.local_probs = probs.flatten().index_select(0, places)
        self.routing_map = None
        return CopyRows.apply(hidden_states, self.copies), tokens_per_expert, self.local_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sums ``[t, h]`` of the outputs ``[k, h]`` of this rank's experts for each token."""
        return SumCopies.apply(hidden_states, self.copies)
