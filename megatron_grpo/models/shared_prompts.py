"""Prefixes that sequences share in a pack (``--share-prompts``), for the ``local`` layers.

Such a pack has a prompt once, without its last token, as a sequence of its own. Each completion is a sequence that
begins with the last token of the prompt, and whose positions go on where the prompt's end. Its tokens attend to the
keys and values of the prompt and to their own. Everything but attention thus computes a prompt once, and all gradients
are those of separate sequences, except for rounding. Completions that begin alike are such a prompt again.
"""

from dataclasses import dataclass

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
