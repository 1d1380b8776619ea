"""The images of a micro-batch."""

from dataclasses import dataclass

from megatron_grpo.vision.kinds import Int64


@dataclass(frozen=True, eq=False)
class PackImages:
    """The images of a pack, on a context-parallel rank: which ones they are, and where their tokens stand.

    Completions with the same images have the same key (`RolloutBatch.image_keys`): ``keys`` are different. ``places``
    [v]: position among the rank's tokens; ``sources`` [v]: position among the tokens of the images of all ``keys``, one
    after the other.
    """

    keys: list[int]
    places: Int64
    sources: Int64
