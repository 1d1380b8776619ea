"""The tokens of a pack that a context-parallel rank holds.

Under a causal mask late tokens attend to more tokens than early ones. Every sequence is therefore cut into 2 * cp equal
chunks, and rank r holds chunks r and 2 * cp - 1 - r: an early chunk and a late chunk, which is the same work on every
rank. megatron-core's rotary embedding and Transformer Engine expect this order.
"""

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


def zigzag(cu_seqlens: Int64, cp_size: int, cp_rank: int) -> Int64:
    """Return the pack positions of the rank's tokens, in the rank's order: int64 ``[cu_seqlens[-1] / cp_size]``.

    ``cu_seqlens`` ``[n + 1]`` are the offsets of the whole sequences. Raises ValueError unless each sequence's length
    is a multiple of 2 * cp_size (any length for cp_size 1, where the rank holds all tokens).
    """
    cu_seqlens = np.asarray(cu_seqlens, np.int64)
    if cp_size == 1:
        return np.arange(cu_seqlens[-1])
    chunks, rest = np.divmod(np.diff(cu_seqlens), 2 * cp_size)
    if rest.any():
        raise ValueError(f"lengths {np.diff(cu_seqlens).tolist()} are not all multiples of 2 * {cp_size}")
    numbers = np.array([cp_rank, 2 * cp_size - 1 - cp_rank])
    begins = (cu_seqlens[:-1, None] + numbers * chunks[:, None]).ravel()  # flattened [sequence, early or late chunk]
    lengths = np.repeat(chunks, 2)
    return np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def sequence_multiple(cp_size: int) -> int:
    """Return the number that divides every padded sequence length: 2 * cp_size chunks, or 1 without CP."""
    return 2 * cp_size if cp_size > 1 else 1


def padded_lengths(lengths: Int64, cp_size: int, samples: npt.NDArray[np.integer] | None = None) -> Int64:
    """Return the padded lengths [n], in tokens, of sequences of ``lengths`` [n] in a pack.

    With ``samples`` [n] each of the n is so many sequences, which are padded one by one: the result is an upper bound.
    """
    multiple = sequence_multiple(cp_size)
    if samples is not None:
        lengths = lengths + (samples - 1) * (multiple - 1)
    return -(-lengths // multiple) * multiple
