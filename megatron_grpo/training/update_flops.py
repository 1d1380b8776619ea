"""Tokens and FLOPs that an update computes, with the images that its completions show."""

import math
from argparse import Namespace
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_grpo.data.batch import Int64, RolloutBatch
from megatron_grpo.data.pack import Pack
from megatron_grpo.data.share import of_completions
from megatron_grpo.estimate.throughput import ModelFlops, TowerFlops
from megatron_grpo.parallel.initialize import host_group
from megatron_grpo.vision.images import ImageStore


def computed(flops: ModelFlops, packs: Iterable[Pack]) -> tuple[int, float]:
    """Return the tokens of micro-batches, without padding, and the TFLOP of an update with them, images apart.

    What a micro-batch shares counts once: such tokens, their pairs with the keys before them, and their labels in the
    head. Those of all context-parallel ranks that hold a micro-batch.
    """
    tokens, tflop = 0, []
    for pack in packs:
        before = np.zeros_like(pack.real_lengths)  # tokens of the ancestors of each sequence
        labels = pack.num_labels
        if pack.shared_prompts is not None and pack.first_labels is not None:
            before = np.diff(pack.shared_prompts.cu_keys.astype(np.int64)) - np.diff(pack.cu_seqlens)
            labels = int(np.count_nonzero(pack.first_labels == np.arange(pack.num_labels)))
        none = np.zeros(1, np.int64)
        tflop.append(flops.update(before + pack.real_lengths, none + labels) - flops.update(before, none))
        tokens += int(pack.real_lengths.sum())
    return tokens, math.fsum(tflop)


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

    def of_update(self, packs: Sequence[Pack], batch: RolloutBatch, completions: Int64) -> dict[str, float]:
        """Return tokens and TFLOP of an update with these completions, as metrics. Collective.

        ``packs`` are the micro-batches of this rank. Images that several completions share are encoded once.
        """
        others = parallel_state.get_tensor_model_parallel_rank() + parallel_state.get_pipeline_model_parallel_rank()
        own = [pack for pack in packs if others == pack.cp_rank == 0]  # several ranks hold a pack; the first counts it
        counts = torch.tensor(computed(self._model, own), dtype=torch.float64)
        dist.all_reduce(counts, group=host_group())
        tokens, found = counts.tolist()
        whole = int(batch.lengths[completions].sum())
        if batch.visual_index is not None:
            keys = np.unique(batch.image_keys[completions])
            assert self.images is not None
            of_rows = [self.images.of_episode(row).grids for row in keys[keys >= 0].tolist()]
            found += TowerFlops(self.args).update(chain.from_iterable(of_rows))
            if batch.image_sizes is not None:
                assert self._of_episodes is not None
                found += self._of_episodes[completions].sum()
        shared = {"tokens/shared": whole - int(tokens)} if self.args.share_prompts else {}
        return {"tokens/update": whole, "flops/update": found, **shared}
