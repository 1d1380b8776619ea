"""The policy term of the loss as the flags ask for it: algorithm/'s functions, put together."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.algorithm import losses, masks
from megatron_grpo.algorithm.registry import LOSSES, PolicyLoss, call
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.sampling_params import uses_engine_log_probs
from megatron_grpo.utils.errors import GrpoError


class PolicyTerm(NamedTuple):
    """The policy term of the loss of one micro-batch; all tensors are [t]."""

    loss: Tensor  # of each token, with rollout importance weights and masks
    clip_low: Tensor  # 1.0 on tokens that the loss type clips below, else 0.0
    clip_high: Tensor  # the same, above
    masked: Tensor  # 1.0 on tokens that a mask leaves out, else 0.0
    metrics: Mapping[str, Tensor]  # that the loss type itself returned: `PolicyLoss`


def policy_term(args, log_probs: Tensor, old: Tensor, batch: dict[str, Tensor]) -> PolicyTerm:
    """Return the loss of --loss-type, times rollout importance weights and masks."""
    policy = _policy_loss(args, log_probs, old, batch["advantages"], batch["completion"])
    loss = policy.loss
    if "kl_cov" in batch:
        loss = loss + batch["kl_cov"] * (log_probs - old).abs()
    if args.rollout_importance_sampling_mode:
        loss = batch["rollout_importance_weights"] * loss
    mask = batch.get("policy_mask", torch.ones_like(old))
    if args.off_policy_sequence_mask_delta is not None:
        engine, delta = batch["rollout_log_probs"], args.off_policy_sequence_mask_delta
        mask = mask * masks.off_policy_sequences(log_probs, engine, batch["advantages"], batch["completion"], delta)
    no_clip = torch.zeros_like(old)
    low, high = (no_clip if clipped is None else clipped for clipped in (policy.clip_low, policy.clip_high))
    return PolicyTerm(mask * loss, low, high, 1 - mask, policy.metrics)


def _policy_loss(args, log_probs: Tensor, old: Tensor, advantages: Tensor, completion: Tensor) -> PolicyLoss:
    inputs = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "log_ratio": losses.log_ratio(log_probs, old, completion, args.importance_sampling_level),
        "advantages": advantages,
        "completion": completion,
    }
    value = call(LOSSES.get(args.loss_type).function, inputs, args)
    if not isinstance(value, PolicyLoss):  # L alone: nothing is clipped
        value = PolicyLoss(value)
    for name, tensor in {"a loss": value.loss, **value.metrics}.items():
        if not isinstance(tensor, Tensor) or tensor.shape != log_probs.shape:
            shape = f"of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"{tensor!r:.80}"
            raise GrpoError(
                f"--loss-type {args.loss_type} returned {name} {shape} for {len(log_probs)} tokens: return one value "
                "for each token"
            )
    for name in value.metrics:
        if not name.startswith(f"{args.loss_type}/") or name.endswith(("/min", "/max")):
            raise GrpoError(
                f"--loss-type {args.loss_type} returned a metric {name!r}, which is logged as a mean over tokens: "
                f'name it "{args.loss_type}/NAME", and not /min or /max'
            )
    return value


def drop_overlong(batch: RolloutBatch) -> None:
    """--overlong-filter: completions cut at the length limit leave the loss; advantages were made with them."""
    cut = np.repeat(batch.finish_reasons == FinishReason.LENGTH, batch.lengths)
    batch.response_mask = np.where(cut, 0, batch.response_mask).astype(np.uint8)


def update_statistics(
    args,
    batch: RolloutBatch,
    completions: np.ndarray,
    iteration: int,
    scores: Callable[[RolloutBatch, np.ndarray], np.ndarray],
) -> RolloutBatch:
    """The batch with what an update must know of all its completions: masks, kl-cov's tokens, advantages that the loss
    itself makes.

    ``scores(batch, completions)`` is a forward-only pass at the present weights, [2, total]: log-probabilities and
    entropies. It runs where one of these flags is given.
    """
    tokens = batch.response_positions(completions)
    user = uses_engine_log_probs(args)
    if user is not None and not np.isfinite(batch.rollout_log_probs[tokens]).all():
        missing = int((~np.isfinite(batch.rollout_log_probs[tokens])).sum())
        raise GrpoError(
            f"{user} needs the log-probabilities of all sampled tokens, but {missing} of {len(tokens)} are missing: "
            "the engine did not return them; leave the flag out, or take an engine that returns them"
        )
    if not len(tokens):  # --overlong-filter has left nothing
        return batch

    kept = np.ones(len(tokens), bool)
    if args.m2po_threshold is not None:
        kept &= masks.second_moment(
            batch.old_log_probs[tokens] - batch.rollout_log_probs[tokens].astype(np.float64), args.m2po_threshold
        )
    by_covariance = args.clip_cov_ratio is not None or args.kl_cov_ratio is not None
    update_advantages = LOSSES.get(args.loss_type).update_advantages
    moved = update_advantages is not None and batch.old_log_probs is not None
    if by_covariance or moved or args.top_entropy_quantile < 1:
        log_probs, entropies = scores(batch, completions)
    if args.top_entropy_quantile < 1:
        kept &= masks.top_entropy(entropies[tokens], args.top_entropy_quantile)
    if by_covariance:
        advantages = batch.advantages_of(tokens, batch.completion_of_tokens[tokens])
        covariances = masks.covariances(advantages, log_probs[tokens])
    if args.clip_cov_ratio is not None:
        bounds = args.clip_cov_ratio, args.clip_cov_lb, args.clip_cov_ub
        kept &= masks.clip_cov(covariances, *bounds, _draws(args, batch, completions, iteration))
    if args.kl_cov_ratio is not None:
        kl_cov = np.zeros(len(batch.tokens), np.float32)
        kl_cov[tokens] = args.kl_cov_coef * masks.kl_cov(covariances, args.kl_cov_ratio)
        batch = replace(batch, kl_cov=kl_cov)
    if not kept.all():
        policy_mask = np.ones(len(batch.tokens), np.float32)
        policy_mask[tokens] = kept
        batch = replace(batch, policy_mask=policy_mask)
    if update_advantages is not None:
        moved_by = (log_probs - batch.old_log_probs)[tokens] if moved else np.zeros(len(tokens))
        batch = _with_update_advantages(args, update_advantages, batch, completions, tokens, moved_by)
    return batch


def _with_update_advantages(
    args,
    update_advantages: Callable[..., np.ndarray],
    batch: RolloutBatch,
    completions: np.ndarray,
    tokens: np.ndarray,
    moved_by: np.ndarray,
) -> RolloutBatch:
    """The batch with the advantages that the loss makes of an update, from d of each of its ``tokens``."""
    sums = np.bincount(batch.completion_of_tokens[tokens], moved_by, minlength=batch.num_completions)
    scores = (sums / np.maximum(batch.response_lengths, 1))[completions]
    unscored = np.isnan(batch.rewards[completions]).all(axis=1)
    signs = np.where(unscored, np.nan, batch.advantages[completions])
    advantages = batch.advantages.copy()
    inputs = {"scores": scores, "advantages": signs, "group_ids": batch.group_ids[completions]}
    advantages[completions] = call(update_advantages, inputs, args)
    return replace(batch, advantages=advantages, token_advantages=None)


def _draws(args, batch: RolloutBatch, completions: np.ndarray, iteration: int) -> np.ndarray:
    """A random number for each token in the loss, a function of the seed, the update, the completion and the place."""
    lengths = batch.response_lengths
    seeds = ([args.seed, iteration, int(batch.sample_ids[i])] for i in completions)
    return np.concatenate([np.random.default_rng(s).random(lengths[i]) for s, i in zip(seeds, completions)])
