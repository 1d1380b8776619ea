"""Prompts that the completions of a group share in a pack (``--share-prompts``), for the ``local`` layers.

Such a pack has a prompt once, without its last token, as a sequence of its own. Each completion is a sequence that
begins with the last token of the prompt, and whose positions go on where the prompt's end. Its tokens attend to the
keys and values of the prompt and to their own. Everything but attention thus computes a prompt once, and all gradients
are those of separate sequences, except for rounding.
"""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_grpo.models.attention_kernels import Kernel


@dataclass
class SharedPack(PackedSeqParams):
    """A pack with shared prompts; ``max_seqlen_kv`` is the largest number of keys that a sequence has."""

    keys: torch.Tensor | None = None  # int64 [k], the position in the pack of every key of the sequences in turn
    cu_keys: torch.Tensor | None = None  # int32 [s + 1], where the keys of each sequence begin


@dataclass(frozen=True)
class SharedKeys:
    """`Kernel` in which several sequences attend to the same keys and values, at the positions ``keys`` ``[k]``.

    Autograd keeps each key and value once: the copies for ``kernel`` live during its call only.
    """

    kernel: Kernel
    keys: torch.Tensor

    def forward(self, q, k, v):
        return self.kernel.forward(q, k.index_select(0, self.keys), v.index_select(0, self.keys))

    def backward(self, grad, q, k, v, out, lse):
        copies = k.index_select(0, self.keys), v.index_select(0, self.keys)
        grad_q, *of_copies = self.kernel.backward(grad, q, *copies, out, lse)
        return grad_q, *(self._sum(copy, part) for copy, part in zip(of_copies, (k, v), strict=True))

    def _sum(self, of_copies: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Sum the gradients of the copies of each key or value in at least float32: sums in bf16 lose digits."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return like.new_zeros(like.shape, dtype=dtype).index_add_(0, self.keys, of_copies.to(dtype)).to(like.dtype)


def angles_of_tokens(angles: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return the rotary angles of all tokens ``[..., t, 1, 1, d]``, given those of all positions and ``[1, t]``."""
    return angles.index_select(angles.dim() - 4, position_ids[0])
