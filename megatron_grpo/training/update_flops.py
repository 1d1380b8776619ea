"""FLOPs of an update, with those of the images that its completions show."""

from argparse import Namespace
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from megatron_grpo.data.batch import Int64, RolloutBatch
from megatron_grpo.data.pack import Pack
from megatron_grpo.data.share import of_completions
from megatron_grpo.estimate.throughput import ModelFlops, TowerFlops
from megatron_grpo.models import forward
from megatron_grpo.vision.images import ImageStore


def text_flops(args: Namespace, flops: ModelFlops, batch: RolloutBatch, completions: Int64) -> float:
    """Return the TFLOP of an update with these completions, images apart; --share-prompts computes prefixes once."""
    found = flops.update(batch.lengths[completions], batch.response_lengths[completions])
    if args.share_prompts:
        shared = forward.shared_tokens(args, batch, completions)
        found -= flops.update(shared, np.zeros_like(shared))
    return found


def computed_flops(flops: ModelFlops, pack: Pack) -> float:
    """Return the TFLOP of a micro-batch, images apart: shared tokens count once, their pairs of keys with all queries.

    Those of all context-parallel ranks that hold the pack.
    """
    before = np.zeros_like(pack.real_lengths)  # tokens of the ancestors of each sequence
    labels = pack.num_labels
    if pack.shared_prompts is not None and pack.first_labels is not None:
        before = np.diff(pack.shared_prompts.cu_keys.astype(np.int64)) - np.diff(pack.cu_seqlens)
        labels = len(np.unique(pack.first_labels))
    none = np.zeros(1, np.int64)
    return flops.update(before + pack.real_lengths, none + labels) - flops.update(before, none)


class UpdateFlops:
    """FLOPs of the updates of a run; ``images`` of a vision-language model."""

    def __init__(self, args: Namespace, images: ImageStore | None):
        self.args, self.images = args, images
        self._of_episodes: npt.NDArray[np.float64] | None = None  # [n] TFLOP in the tower

    @cached_property
    def _model(self) -> ModelFlops:
        return ModelFlops(self.args)

    def take_episodes(self, batch: RolloutBatch) -> None:
        """Count the images that environments have shown in the held completions of a new rollout. Collective."""
        assert self.images is not None
        own, flops = np.zeros(batch.num_completions), TowerFlops(self.args)
        for i in np.flatnonzero(batch.held & (batch.image_keys < 0)):
            own[i] = flops.update(self.images.of(int(batch.image_keys[i])).grids)
        self._of_episodes = of_completions(batch, own)

    def of_update(self, batch: RolloutBatch, completions: Int64) -> float:
        """Return the TFLOP of an update with these completions; images that several share are encoded once."""
        found = text_flops(self.args, self._model, batch, completions)
        if batch.visual_index is not None:
            keys = np.unique(batch.image_keys[completions])
            assert self.images is not None
            of_rows = [self.images.of_episode(row).grids for row in keys[keys >= 0].tolist()]
            found += TowerFlops(self.args).update(chain.from_iterable(of_rows))
            if batch.image_sizes is not None:
                assert self._of_episodes is not None
                found += self._of_episodes[completions].sum()
        return found
