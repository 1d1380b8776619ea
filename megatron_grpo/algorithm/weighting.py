"""Token weights, which average the losses of single tokens over the global batch.

"Average over the tokens of a completion, then over completions" and "average over all tokens" are different
algorithms, and both are wrong if each micro-batch averages over its own tokens. Therefore micro-batches never compute
an average: the lengths give its denominators, and these give a weight w[i,t] over the *global* batch of an update, with

    loss = sum over completions i, tokens t of  w[i,t] * L[i,t]

exactly, for all micro-batches, packings and parallel configurations. The weights are constant within a completion, so
only one number per completion is stored.
"""

import numpy as np
import numpy.typing as npt

from megatron_grpo.algorithm.registry import AGGREGATIONS, Aggregation


def token_weights(
    aggregation: Aggregation,
    lengths: npt.NDArray[np.int64],
    micro_batch_size: int,
    max_completion_length: int,
) -> npt.NDArray[np.float64]:
    """Return the weight of every token of each completion of an update.

    With n completions and T_i tokens that count in completion i:

        grpo     1 / (n T_i)                    mean over each completion, then over completions
        dapo     1 / sum of T                   mean over all tokens of the update
        dr_grpo  1 / (n max_completion_length)  a constant: independent of the length
        bnpo     1 / (B sum of T in its block)  mean over all tokens of a block, then over the B blocks

    Every loss type has one of these as its ``aggregation``.

    A block is `micro_batch_size` consecutive completions in the given order, independently of packing and of data
    parallelism (the last block may be shorter). n and B count every completion and block, also those without a token
    that counts; such completions have weight 0.

    Args:
        aggregation: one of AGGREGATIONS.
        lengths: [n], T_i: the number of tokens in the loss of each completion of the *whole* update, in global order.
        micro_batch_size: completions in a block; read by bnpo only.
        max_completion_length: tokens; read by dr_grpo only.

    Returns:
        [n].

    Raises:
        ValueError: unknown `aggregation`.

    Source: grpo: Shao et al. 2024, arXiv:2402.03300, eq. 3. dapo: Yu et al. 2025, arXiv:2503.14476, section 3.3.
    dr_grpo: Liu et al. 2025, arXiv:2503.20783. bnpo: TRL's loss_type of that name, which averages over the tokens of
    one micro-batch.
    """
    n = len(lengths)
    if aggregation == "grpo":
        denominators = n * lengths
    elif aggregation == "dapo":
        denominators = np.full(n, lengths.sum())
    elif aggregation == "dr_grpo":
        denominators = np.full(n, n * max_completion_length)
    elif aggregation == "bnpo":
        block = np.arange(n) // micro_batch_size
        tokens_in_block = np.bincount(block, weights=lengths)
        denominators = len(tokens_in_block) * tokens_in_block[block]
    else:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, not {aggregation!r}")
    weights = np.zeros(n)
    np.divide(1.0, denominators, out=weights, where=lengths > 0)
    return weights
