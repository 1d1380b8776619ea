"""The policy term of the loss, and the update statistics for it, as configured by the flags."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.algorithm import losses, masks
from megatron_grpo.algorithm.importance_sampling import importance_weights
from megatron_grpo.algorithm.registry import LOSS_INPUTS, LOSSES, TOKEN_STATISTICS, Loss, PolicyLoss, call
from megatron_grpo.data.batch import FinishReason, RolloutBatch
from megatron_grpo.data.sampling_params import uses_engine_log_probs
from megatron_grpo.data.share import of_completions
from megatron_grpo.utils.errors import GrpoError


class PolicyTerm(NamedTuple):
    """Policy term of the loss of one micro-batch; all tensors are [t]."""

    loss: Tensor  # of each token, with rollout importance weights and masks
    clip_low: Tensor  # 1.0 on tokens that the loss type clips below, else 0.0
    clip_high: Tensor  # the same, above
    masked: Tensor  # 1.0 on tokens that a mask leaves out, else 0.0
    weight_clipped: Tensor | None  # `ImportanceWeights.clipped`; None without --rollout-importance-sampling-mode
    metrics: Mapping[str, Tensor]  # of the loss type: `PolicyLoss.metrics`


def policy_term(args, log_probs: Tensor, old: Tensor, batch: dict[str, Tensor]) -> PolicyTerm:
    """Return the loss of --loss-type, multiplied by rollout importance weights and masks."""
    policy = policy_loss(args, log_probs, old, batch)
    loss = policy.loss
    if "kl_cov" in batch:
        loss = loss + batch["kl_cov"] * (log_probs - old).abs()
    weight_clipped = None
    if args.rollout_importance_sampling_mode:
        weights, weight_clipped = importance_weights(
            args.rollout_importance_sampling_mode,
            old,
            batch["rollout_log_probs"],
            batch["completion"],
            args.rollout_importance_sampling_threshold,
            args.rollout_importance_sampling_lower_bound,
        )
        loss = weights * loss
    mask = batch.get("policy_mask", torch.ones_like(old))
    if args.off_policy_sequence_mask_delta is not None:
        engine, delta = batch["rollout_log_probs"], args.off_policy_sequence_mask_delta
        mask = mask * masks.off_policy_sequences(log_probs, engine, batch["advantages"], batch["completion"], delta)
    no_clip = torch.zeros_like(old)
    low, high = (no_clip if clipped is None else clipped for clipped in (policy.clip_low, policy.clip_high))
    return PolicyTerm(mask * loss, low, high, 1 - mask, weight_clipped, policy.metrics)


def policy_loss(args, log_probs: Tensor, old: Tensor, batch: Mapping[str, Tensor]) -> PolicyLoss:
    """Return the result of --loss-type for one micro-batch; GrpoError for a wrong shape or name in it."""
    inputs = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "log_ratio": losses.log_ratio(log_probs, old, batch["completion"], args.importance_sampling_level),
        **{name: batch[name] for name in LOSS_INPUTS if name in batch and name != "old_log_probs"},
    }
    value = call(LOSSES.get(args.loss_type).function, inputs, args)
    if not isinstance(value, PolicyLoss):  # only L: the loss clips no token
        value = PolicyLoss(value)
    named = {f"the metric {name!r}": tensor for name, tensor in value.metrics.items()}
    for name, tensor in {"a loss": value.loss, **named}.items():
        if not isinstance(tensor, Tensor) or tensor.shape != log_probs.shape:
            shape = f"of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"{tensor!r:.80}"
            raise GrpoError(
                f"--loss-type {args.loss_type} returned {name} {shape} for {len(log_probs)} tokens: return one value "
                "for each token, whose mean the run takes"
            )
    for name in value.metrics:
        if not name.startswith(f"{args.loss_type}/") or name.endswith(("/min", "/max")):
            raise GrpoError(
                f"--loss-type {args.loss_type} returned a metric {name!r}, which is logged as a mean over tokens: "
                f'name it "{args.loss_type}/NAME", and not /min or /max'
            )
    return value


def drop_overlong(batch: RolloutBatch) -> RolloutBatch:
    """Return the batch without loss on completions cut at the length limit (--overlong-filter).

    The advantages do not change: the rewards of these completions are part of the baseline.
    """
    cut = batch.finish_reasons == FinishReason.LENGTH
    mask = np.where(np.repeat(cut, batch.held_lengths), 0, batch.response_mask).astype(np.uint8)
    return replace(batch, response_mask=mask, all_response_lengths=np.where(cut, 0, batch.response_lengths))


def update_statistics(
    args,
    batch: RolloutBatch,
    completions: np.ndarray,
    iteration: int,
    scores: Callable[[RolloutBatch, np.ndarray], np.ndarray],
) -> tuple[RolloutBatch, dict[str, float]]:
    """Return the batch with all arrays that depend on all ``completions`` of an update, and metrics. Collective.

    The arrays are masks, the tokens of kl-cov, statistics that the loss reads, and advantages that the loss replaces. A
    rank has those of the tokens that it holds. The metrics are those of the loss (``update_metrics``).

    ``scores(batch, completions)`` runs a forward-only pass at the present weights and returns [2, total]:
    log-probabilities and entropies. It is called only if one of these arrays needs it (`may_need_scores`).
    """
    loss = LOSSES.get(args.loss_type)
    requested = [name for name in TOKEN_STATISTICS if name in loss.parameters]
    completions = completions[np.argsort(batch.sample_ids[completions])]  # the order of ties
    tokens = batch.response_positions(completions)
    completion = batch.completion_of_tokens[tokens]
    _check_engine_log_probs(args, batch.rollout_log_probs[tokens])
    if not batch.response_lengths[completions].any():  # --overlong-filter has masked all tokens
        empty: dict[str, Any] = {name: np.zeros(len(batch.tokens), np.float32) for name in requested}
        return (replace(batch, **empty) if requested else batch), {}

    number = np.zeros(batch.num_completions, np.int64)  # in the update, of each completion
    number[completions] = np.arange(len(completions))
    of_update = masks.Tokens(number[completion], len(completions), _gather(batch, completions))

    by_covariance = args.clip_cov_ratio is not None or args.kl_cov_ratio is not None or "covariances" in requested
    moved = loss.update_advantages is not None and batch.old_log_probs is not None
    statistics = {}
    if by_covariance or moved or loss.reads_reference or requested or args.top_entropy_quantile < 1:
        log_probs, entropies = (values[tokens] for values in scores(batch, completions))
        statistics["entropies"] = entropies
    if by_covariance:
        statistics["covariances"] = masks.covariances(batch.advantages_of(tokens, completion), log_probs, of_update)

    kept = np.ones(len(tokens), bool)
    if args.m2po_threshold is not None:
        assert batch.old_log_probs is not None
        differences = batch.old_log_probs[tokens] - batch.rollout_log_probs[tokens].astype(np.float64)
        kept &= masks.second_moment(differences, args.m2po_threshold, of_update)
    if args.top_entropy_quantile < 1:
        kept &= masks.top_entropy(entropies, args.top_entropy_quantile, of_update)
    if args.clip_cov_ratio is not None:
        bounds = args.clip_cov_ratio, args.clip_cov_lb, args.clip_cov_ub
        draws = _random_numbers(args, batch, completions, iteration)
        kept &= masks.clip_cov(statistics["covariances"], *bounds, draws, of_update)
    changed: dict[str, Any] = {name: _scatter(batch, tokens, statistics[name], 0.0) for name in requested}
    if args.kl_cov_ratio is not None:
        chosen = masks.kl_cov(statistics["covariances"], args.kl_cov_ratio, of_update)
        changed["kl_cov"] = _scatter(batch, tokens, args.kl_cov_coef * chosen, 0.0)
    if of_update.count(~kept):
        changed["policy_mask"] = _scatter(batch, tokens, kept, 1.0)
    if changed:
        batch = replace(batch, **changed)
    if loss.update_advantages is None:
        return batch, {}
    sums = {}
    if batch.old_log_probs is not None:
        sums["scores"] = log_probs - batch.old_log_probs[tokens]
    if loss.reads_reference:
        assert batch.ref_log_probs is not None
        sums["over_reference"] = log_probs.astype(np.float64) - batch.ref_log_probs[tokens]
    return _with_update_advantages(args, loss, batch, completions, tokens, sums)


def _gather(batch: RolloutBatch, completions: np.ndarray) -> masks.Gather:
    """Return a function that completes values of ``completions``, [m], from those that this rank holds."""

    def gather(values: np.ndarray) -> np.ndarray:
        whole = np.zeros(batch.num_completions)
        whole[completions] = values
        return of_completions(batch, whole)[completions]

    return gather


def _check_engine_log_probs(args, rollout_log_probs: np.ndarray) -> None:
    """Raise GrpoError if a flag reads the engine's log-probabilities and some tokens lack them."""
    flag = uses_engine_log_probs(args)
    missing = int((~np.isfinite(rollout_log_probs)).sum())
    if flag is not None and missing:
        why = "the engine did not return them; leave the flag out, or take an engine that returns them"
        if args.train_only:
            why = "the ledger of --train-only lacks them; leave the flag out, or write it from rows that all have them"
        raise GrpoError(
            f"{flag} needs the log-probabilities of all sampled tokens, but {missing} of {len(rollout_log_probs)} are "
            f"missing: {why}"
        )


def _scatter(batch: RolloutBatch, tokens: np.ndarray, values: np.ndarray, elsewhere: float) -> np.ndarray:
    """Return an array [total] with ``values`` at the positions ``tokens``, and ``elsewhere`` at all others."""
    flat = np.full(len(batch.tokens), elsewhere, np.float32)
    flat[tokens] = values
    return flat


def _with_update_advantages(
    args,
    loss: Loss,
    batch: RolloutBatch,
    completions: np.ndarray,
    tokens: np.ndarray,
    sums: Mapping[str, np.ndarray],
) -> tuple[RolloutBatch, dict[str, float]]:
    """Return the batch with the advantages that the loss computes for an update, and the loss's metrics of it.

    ``sums`` has, by the name of an input, values of the held ``tokens`` of the update, to be summed over each
    completion. Without values the scores are 0: the policy has not moved.
    """
    assert batch.advantages is not None and loss.update_advantages is not None
    lengths = batch.response_lengths[completions]
    unscored = np.isnan(batch.rewards[completions]).all(axis=1)
    inputs = {
        "scores": np.zeros(len(completions)),
        "advantages": np.where(unscored, np.nan, batch.advantages[completions]),
        "group_ids": batch.group_ids[completions],
        "lengths": lengths,
    }
    for name, values in sums.items():
        own = np.bincount(batch.completion_of_tokens[tokens], values, minlength=batch.num_completions)
        inputs[name] = of_completions(batch, own)[completions]
    inputs["scores"] = inputs["scores"] / np.maximum(lengths, 1)
    advantages = batch.advantages.copy()
    advantages[completions] = call(loss.update_advantages, inputs, args)
    batch = replace(batch, advantages=advantages, token_advantages=None)
    return batch, loss_metrics_of_update(args, loss, inputs)


def loss_metrics_of_update(args, loss: Loss, inputs: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a loss (``update_metrics``) from UPDATE_INPUTS; GrpoError for a wrong form or name."""
    found = call(loss.update_metrics, inputs, args) if loss.update_metrics else {}
    if not isinstance(found, Mapping):
        raise GrpoError(
            f"--loss-type {loss.name}: update_metrics returned {found!r:.80}: return a dict of numbers by name "
            f'("{loss.name}/NAME")'
        )
    for name, value in found.items():
        if not isinstance(value, Real):
            raise GrpoError(f"--loss-type {loss.name}: update_metrics returned {name!r}: {value!r:.80}, not a number")
        if not str(name).startswith(f"{loss.name}/"):
            raise GrpoError(
                f'--loss-type {loss.name}: update_metrics returned a metric {name!r}: name it "{loss.name}/NAME"'
            )
    return {name: float(value) for name, value in found.items()}


def _random_numbers(args, batch: RolloutBatch, completions: np.ndarray, iteration: int) -> np.ndarray:
    """Return a random number for each held token in the loss: a function of seed, update, completion and position."""
    held = completions[batch.held[completions]]
    seeds = ([args.seed, iteration, int(batch.sample_ids[i])] for i in held)
    numbers = [np.random.default_rng(s).random(batch.response_lengths[i]) for s, i in zip(seeds, held, strict=True)]
    return np.concatenate([np.zeros(0), *numbers])
