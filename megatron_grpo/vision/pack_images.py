"""The images of a micro-batch."""

from dataclasses import dataclass

from megatron_grpo.vision.kinds import Int64


@dataclass(frozen=True, eq=False)
class PackImages:
    """The images of a pack, on a context-parallel rank: whose rows' they are, and where their tokens stand.

    Completions of one row share its images: ``rows`` are different. ``places`` [v]: position among the rank's tokens;
    ``sources`` [v]: position among the tokens of the images of all ``rows``, one after the other.
    """

    rows: list[int]
    places: Int64
    sources: Int64
