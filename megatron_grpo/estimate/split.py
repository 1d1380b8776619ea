"""Split of a launch into engine ranks and trainer ranks (--rollout-ranks): pure functions, without torch.

With N engine ranks and T trainer ranks a batch takes g(N) seconds to generate and t(T) to train. With --max-staleness
above 0 both sides work at the same time, and a step takes max(g, t); with 0 they take turns, and it takes g + t.
"""

from collections.abc import Callable, Iterable

Sides = Callable[[int, int], tuple[float, float]]  # (engine ranks, trainer ranks): seconds g, t


def measured(generate: float, train: float) -> Sides:
    """Return g = generate / N and t = train / T: rank seconds of a batch, spread over any ranks without loss."""
    return lambda engines, trainers: (generate / engines, train / trainers)


def step_seconds(sides: Sides, engines: int, trainers: int, max_staleness: int) -> float:
    """Return the seconds of a step with this split (module docstring)."""
    return max(sides(engines, trainers)) if max_staleness else sum(sides(engines, trainers))


def fastest(
    possible: Iterable[int], launched: int, sides: Sides, max_staleness: int, present: int | None = None
) -> int:
    """Return the one of ``possible`` numbers of engine ranks with the shortest step; of equal ones the smallest.

    The ``present`` number stays if no other one is more than 5% faster.
    """
    seconds = {n: step_seconds(sides, n, launched - n, max_staleness) for n in sorted(possible)}
    best = min(seconds, key=lambda n: seconds[n])
    return present if present in seconds and seconds[present] <= 1.05 * seconds[best] else best
