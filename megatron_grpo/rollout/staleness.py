"""Rules of bounded staleness (``--max-staleness K``): how many groups may start, and which ones the trainer takes.

B is the quota: the groups of a batch. The version v is the number of batches that the trainer has taken, and of the
weights that generate. Groups have consecutive numbers in the order in which they start; ``births[g]`` is the version at
the start of group g. The rules hold for each engine replica with its own quota, so that no replica waits for another.

    start   while started < (K + v + 1) B
    take    the oldest B complete groups among the oldest 2 B that are not taken yet, if every group with
            birth + K <= v is among them; otherwise generate further

Groups start in order, so those that must be taken are the oldest, and there are never more than B of them. A group is
therefore taken at most K versions after its start, every group is taken once, and complete groups never wait for more
than the ones that must be taken. The window of 2 B bounds the advantage of short completions.

Source: the bound of starts: AReaL (Fu et al. 2025, arXiv:2505.24298).
"""

from collections.abc import Collection, Mapping


def groups_to_start(started: int, version: int, quota: int, max_staleness: int) -> int:
    """Return how many groups may start at ``version``, when ``started`` groups have started so far."""
    return (max_staleness + version + 1) * quota - started


def groups_to_take(
    births: Mapping[int, int], complete: Collection[int], version: int, quota: int, max_staleness: int
) -> list[int] | None:
    """Return the groups of the next batch in order, or None if the engine has to generate further.

    ``births`` has all groups that have started and are not taken, ``complete`` those of them with all completions.
    """
    window = sorted(births)[: 2 * quota]
    taken = [group for group in window if group in complete][:quota]
    due = {group for group, birth in births.items() if birth + max_staleness <= version}
    return taken if len(taken) == quota and due <= set(taken) else None
