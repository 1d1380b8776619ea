"""pass@k: the probability that one of k sampled completions is right, estimated from at least k samples."""

from math import comb

import numpy as np
import numpy.typing as npt

from megatron_grpo.algorithm.groups import members_of_groups


def pass_at_k(right: npt.NDArray[np.bool_], group_ids: npt.NDArray[np.int64], k: int) -> float:
    """Return the unbiased estimate of pass@k, mean over prompts: 1 - C(n - c, k) / C(n, k) if c of n are right.

    ``right`` and ``group_ids`` are ``[completions]``. Chen et al. 2021 (arXiv:2107.03374), equation 1. Raises
    ValueError when a prompt has fewer than k completions.
    """
    estimates = []
    for members in members_of_groups(group_ids):
        n, c = len(members), int(right[members].sum())
        if n < k:
            raise ValueError(
                f"pass@{k} needs {k} completions of each prompt, and group {group_ids[members[0]]} has {n}"
            )
        estimates.append(1.0 - comb(n - c, k) / comb(n, k))
    return float(np.mean(estimates))


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4 ... up to ``limit``, the values of k in evaluations."""
    return [2**i for i in range(limit.bit_length())]
