"""Members of groups, in time n log n for any number of groups: `gigpo` has one for each state of an environment."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


def by_group(group_ids: Int64) -> tuple[Int64, Int64]:
    """Return ``order`` [n] and ``begins`` [groups + 1]: group k has the members order[begins[k] : begins[k + 1]].

    Groups are in ascending order, and so are the members of each.
    """
    order = np.argsort(group_ids, kind="stable")
    changes = np.flatnonzero(np.diff(group_ids[order])) + 1
    return order, np.concatenate([np.zeros(min(len(order), 1), np.int64), changes, [len(order)]])


def members_of_groups(group_ids: Int64) -> list[Int64]:
    """Return the indices of the members of each group, in ascending order of groups and members."""
    order, begins = by_group(group_ids)
    return [order[begin:end] for begin, end in pairwise(begins)]
