"""Division of a rollout into updates."""

import numpy as np
import numpy.typing as npt

from megatron_grpo.algorithm.registry import Loss

Int64 = npt.NDArray[np.int64]


def divide_rollout(group_ids: Int64, num_updates: int, shuffle: bool, loss: Loss, seed: int) -> list[Int64]:
    """Return the completions of each update of one pass over a rollout.

    Without ``shuffle`` the completions keep their order. With ``shuffle`` they are permuted, so that most groups are
    spread over the updates; with a ``loss`` of whole groups, the groups are permuted instead. The advantages are those
    of the whole rollout in both cases. Every pass of --num-iterations has the same updates.

    Args:
        group_ids: [n], equal for the completions of one prompt.
        num_updates: --steps-per-generation, a divisor of n; with a loss of whole groups, of the number of groups.
        shuffle: --shuffle-completions.
        loss: of --loss-type.
        seed: of the rollout. The permutation is a function of it and of ``group_ids``, and thus equal on all ranks, in
            every parallel configuration, and after a resume.

    Returns:
        [num_updates] arrays of n / num_updates indices each.
    """
    order = np.arange(len(group_ids))
    if shuffle:
        rng = np.random.default_rng(seed)
        if loss.whole_groups:
            groups, group = np.unique(group_ids, return_inverse=True)
            order = np.argsort(rng.permutation(len(groups))[group], kind="stable")
        else:
            order = rng.permutation(order)
    return np.split(order, num_updates)
