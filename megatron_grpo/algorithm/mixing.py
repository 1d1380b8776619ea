"""Demonstrations beside a rollout: the weight mu of their loss in an update, and the token weights of both."""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.algorithm.registry import Aggregation
from megatron_grpo.algorithm.weighting import token_weights
from megatron_grpo.data.batch import RolloutBatch


def mu(update: int, peak: float, valley: float | None, warmup: int | None, decay: int | None) -> float:
    """Return the weight of the demonstrations' loss in update number ``update``, from 0.

        update < warmup           peak update / warmup
        update < warmup + decay   valley + (peak - valley) (1 + cos(pi (update - warmup) / decay)) / 2
        else                      valley

    None: a ``valley`` of ``peak``, a ``warmup`` and a ``decay`` of 0 updates.

    Source: CHORD (arXiv:2508.11408), section 3.2, as its authors' code and ms-swift have the schedule.
    """
    low, first, length = peak if valley is None else valley, warmup or 0, decay or 0
    if update < first:
        return peak * update / first
    if update < first + length:
        return low + (peak - low) * (1 + math.cos(math.pi * (update - first) / length)) / 2
    return low


def mu_of(args, update: int) -> float:
    """Return `mu` of the flags; 1 for a loss whose demonstrations join the groups, which has no mu."""
    if LOSSES.get(args.sft_loss_type).joins_groups:
        return 1.0
    flags = args.chord_mu_peak, args.chord_mu_valley, args.chord_mu_warmup_steps, args.chord_mu_decay_steps
    return mu(update, *flags)


def with_token_weights(
    args, batch: RolloutBatch, completions: npt.NDArray[np.int64], demonstrations: RolloutBatch | None, update: int
) -> tuple[RolloutBatch, RolloutBatch | None]:
    """Return the batch and the demonstrations with the token weights (`token_weights`) of an update.

    Without demonstrations the weights average over the ``completions`` of the update, as --loss-type does. With them,
    the loss of update number ``update``, from 0, is

        (1 - mu) L(rollout) + mu L(demonstrations)

    where each L is an average of its own: the rollout's as without demonstrations, with its KL and entropy terms, and
    that of the demonstrations over their tokens. Demonstrations that join the groups (LUFFY) are completions like the
    others instead: one average, that of --loss-type, over all.

    Source: CHORD (arXiv:2508.11408, eq. 3); LUFFY (arXiv:2504.14945, eq. 3).
    """
    lengths, loss = batch.response_lengths[completions], LOSSES.get(args.loss_type)
    of_demonstrations = np.zeros(0)
    if demonstrations is None:
        own = _average(args, loss.aggregation, lengths)
    elif LOSSES.get(args.sft_loss_type).joins_groups:
        whole = _average(args, loss.aggregation, np.concatenate([lengths, demonstrations.response_lengths]))
        own, of_demonstrations = np.split(whole, [len(lengths)])
    else:
        share, aggregation = mu_of(args, update), LOSSES.get(args.sft_loss_type).aggregation
        own = (1 - share) * _average(args, loss.aggregation, lengths)
        of_demonstrations = share * _average(args, aggregation, demonstrations.response_lengths)
    weights = np.zeros(batch.num_completions, np.float32)
    weights[completions] = own
    if demonstrations is not None:
        demonstrations = replace(demonstrations, weights=of_demonstrations.astype(np.float32))
    return replace(batch, weights=weights), demonstrations


def _average(args, aggregation: Aggregation, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return token_weights(aggregation, lengths, args.micro_batch_size, args.max_completion_length)
