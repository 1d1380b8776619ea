"""Counts of drafts in speculative decoding, as vLLM defines them (``SpecDecodingStats``), and their metrics.

``[3]``: drafts (one for each request and step that checks one), their tokens, and those of them that were accepted. A
step that checks a draft yields its accepted tokens and one more.
"""

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_grpo.parallel.initialize import host_group

DraftCounts = npt.NDArray[np.int64]


def no_drafts() -> DraftCounts:
    """Return counts of 0."""
    return np.zeros(3, np.int64)


def draft_metrics(counts: DraftCounts) -> dict[str, float]:
    """Return the metrics of counts, with the names of METRICS."""
    drafts, tokens, accepted = counts.tolist()
    return {
        "drafts/proposed": tokens,
        "drafts/accepted": accepted,
        "drafts/acceptance_length": 1 + accepted / max(drafts, 1),
    }


def metrics_of_all_ranks(counts: DraftCounts | None) -> dict[str, float]:
    """Return the metrics of the sum over all ranks; none if all have None. Collective."""
    total = torch.tensor([0, 0, 0, 0] if counts is None else [*counts.tolist(), 1])
    dist.all_reduce(total, group=host_group())
    return draft_metrics(total[:3].numpy()) if total[3] else {}
