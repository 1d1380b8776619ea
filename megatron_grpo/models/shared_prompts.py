"""Prefixes that sequences share in a pack (``--share-prompts``), for the ``local`` layers.

Such a pack has a prompt once, without its last token, as a sequence of its own. Each completion is a sequence that
begins with the last token of the prompt, and whose positions go on where the prompt's end. Its tokens attend to the
keys and values of the prompt and to their own. Everything but attention thus computes a prompt once, and all gradients
are those of separate sequences, except for rounding. Completions that begin alike are such a prompt again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_grpo.data.pack import SharedPrompts


@dataclass(kw_only=True)
class SharedPack(PackedSeqParams):
    """A pack with shared prefixes; ``max_seqlen_kv`` is the largest number of keys that a sequence has."""

    shared: SharedPrompts
    position_ids: torch.Tensor  # int64 [t], those of `SharedPrompts`


def angles_of_tokens(angles: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return the rotary angles of all tokens ``[..., t, 1, 1, d]``, given those of all positions and ``[t]``."""
    return angles.index_select(angles.dim() - 4, position_ids)


class RopeOfPack(torch.nn.Module):
    """The rotary embedding of a layer of latent attention, which gives the angles of the tokens of a `SharedPack`.

    The layer passes its pack for the number of positions, right before it asks for their angles.
    """

    rope: Any

    def __init__(self, rope: torch.nn.Module):
        super().__init__()
        self.rope = rope
        self._pack: SharedPack | None = None

    def get_rotary_seq_len(self, context: Any, decoder: Any, hidden_states: Any, config: Any, pack: Any) -> int:
        self._pack = pack if isinstance(pack, SharedPack) else None
        return self.rope.get_rotary_seq_len(context, decoder, hidden_states, config, pack)

    def get_cached_cos_sin(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of all positions, for the fused kernel, which knows no `SharedPack`."""
        return self.rope.get_cached_cos_sin(*args, **kwargs)

    def forward(self, length: int, **how: Any) -> Any:
        """Return angles ``[s, 1, 1, d]``, and for YaRN the factor of cosines and sines."""
        pack, self._pack = self._pack, None
        found = self.rope(length, **how)
        if pack is None:
            return found
        if isinstance(found, tuple):
            return angles_of_tokens(found[0], pack.position_ids), *found[1:]
        return angles_of_tokens(found, pack.position_ids)
