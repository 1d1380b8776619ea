"""The advantages of a rollout, as configured by the flags."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron_grpo.algorithm.advantages import ADVANTAGES
from megatron_grpo.algorithm.distillation import on_policy_distillation
from megatron_grpo.algorithm.kl import kl_penalties
from megatron_grpo.algorithm.registry import Estimator, call
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.share import mean_in_loss, of_completions
from megatron_grpo.utils.errors import GrpoError


def estimate_advantages(args, batch: RolloutBatch, rewards: np.ndarray) -> tuple[RolloutBatch, dict[str, float]]:
    """Return the batch with ``advantages`` (``token_advantages`` if they can differ in a completion), and the metrics.

    ``rewards`` [n] are the weighted sums. --kl-in-reward needs log-probabilities under the old policy and the
    reference model; a teacher needs log-probabilities under the old policy and the teacher. Where these are not finite
    the advantages are NaN, so that the loss is, and --on-bad-update decides.
    """
    metrics, penalties, spoiled = {}, None, np.zeros(batch.num_completions, bool)
    if args.kl_in_reward:
        assert batch.old_log_probs is not None and batch.ref_log_probs is not None
        penalties = kl_penalties(batch.old_log_probs, batch.ref_log_probs, batch.response_mask, args.beta)
        spoiled = _sum_per_completion(batch, np.isnan(penalties)) > 0
        penalties = np.nan_to_num(penalties)  # for the other completions of the group
        metrics["reward/kl_penalty"] = float(_sum_per_completion(batch, penalties).mean())
    advantages, of_tokens = _estimate(args, batch, rewards, penalties)
    if batch.teacher_log_probs is not None:
        assert batch.old_log_probs is not None
        metrics["teacher/kl"] = mean_in_loss(batch, batch.old_log_probs - batch.teacher_log_probs)
        if of_tokens is None:
            assert advantages is not None
            of_tokens = np.repeat(advantages, batch.held_lengths)
        of_tokens = on_policy_distillation(
            of_tokens,
            batch.teacher_log_probs,
            batch.old_log_probs,
            batch.response_mask,
            args.teacher_kl_coef,
        )
    if of_tokens is not None:  # of a completion: the mean over its tokens in the loss
        of_tokens = np.where(np.repeat(spoiled, batch.held_lengths), np.float32(np.nan), of_tokens)
        means = _sum_per_completion(batch, of_tokens) / np.maximum(batch.response_lengths, 1)
        advantages = means.astype(np.float32)
    assert advantages is not None
    advantages = np.where(spoiled, np.float32(np.nan), advantages)
    return replace(batch, advantages=advantages, token_advantages=of_tokens), metrics | _metrics(advantages)


def estimate_joint_advantages(
    args, batch: RolloutBatch, rewards: np.ndarray, demonstrations: RolloutBatch
) -> tuple[RolloutBatch, RolloutBatch, dict[str, float]]:
    """Return the batch and the demonstrations of its groups with ``advantages``, and the metrics of the batch.

    A group has its completions, with ``rewards`` [n], and its demonstrations, each with --luffy-reward: the estimator
    sees n + m completions.

    Source: LUFFY (Yan et al. 2025, arXiv:2504.14945, eq. 4).
    """
    of_demonstrations = np.full(demonstrations.num_completions, _reward_of_demonstrations(args), rewards.dtype)
    inputs = {
        "rewards": np.concatenate([rewards, of_demonstrations]),
        "group_ids": np.concatenate([batch.group_ids, demonstrations.group_ids]),
    }
    advantages = _advantages(args, inputs, len(inputs["rewards"]))
    own, others = np.split(advantages, [batch.num_completions])
    return replace(batch, advantages=own), replace(demonstrations, advantages=others), _metrics(own)


def _reward_of_demonstrations(args) -> float:
    return 1.0 if args.luffy_reward is None else args.luffy_reward


def _metrics(advantages: np.ndarray) -> dict[str, float]:
    std = float(advantages.std(ddof=1)) if len(advantages) > 1 else 0.0
    return {"advantage/mean": float(advantages.mean()), "advantage/std": std}


def _estimate(
    args, batch: RolloutBatch, rewards: np.ndarray, penalties: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return (advantages of completions, advantages of tokens) of --advantage-estimator; one of them is None."""
    estimator = ADVANTAGES.get(args.advantage_estimator)
    if penalties is not None and "penalties" not in estimator.parameters:
        rewards = (rewards - _sum_per_completion(batch, penalties)).astype(np.float32)
    inputs = {
        "rewards": rewards,
        "function_rewards": batch.rewards,
        "group_ids": batch.group_ids,
        "response_mask": batch.response_mask,
        "cu_seqlens": batch.cu_seqlens,
        "penalties": penalties,
        "gather": partial(of_completions, batch),
        "turns": batch.turns,
        "turn_rewards": None if batch.turn_rewards is None else batch.turn_rewards * _environment_weight(args),
        "turn_states": batch.turn_states,
    }
    advantages = _advantages(args, inputs, len(batch.tokens) if estimator.per_token else batch.num_completions)
    return (None, advantages) if estimator.per_token else (advantages, None)


def _advantages(args, inputs: dict[str, Any], size: int) -> np.ndarray:
    """Return the ``size`` advantages of --advantage-estimator; GrpoError for other or infinite ones."""
    estimator = ADVANTAGES.get(args.advantage_estimator)
    advantages = np.asarray(call(estimator.function, inputs, args), np.float32)
    of_shape(estimator, advantages, size)
    if not np.isfinite(advantages).all():
        largest = np.nanmax(np.abs(inputs["rewards"]), initial=0)
        raise GrpoError(
            f"--advantage-estimator {estimator.name} returned infinity or NaN for rewards of up to {largest:g}: give "
            "smaller --reward-weights, or another estimator"
        )
    return advantages


def of_shape(estimator: Estimator, advantages: np.ndarray, size: int) -> None:
    """Raise GrpoError unless an estimator returned ``size`` advantages."""
    if advantages.shape != (size,):
        raise GrpoError(
            f"--advantage-estimator {estimator.name} returned advantages of shape {advantages.shape}: return one "
            f"of each {'token' if estimator.per_token else 'completion'} ({size})"
        )


def _environment_weight(args) -> float:
    """Return the weight of the environment's rewards in the sum over reward functions."""
    weights = dict(zip(args.reward_funcs, args.reward_weights, strict=True))
    return weights.get("environment", 0.0)


def _sum_per_completion(batch: RolloutBatch, values: np.ndarray) -> np.ndarray:
    """Return the sums of ``values`` [total] over each completion, [n]. Collective."""
    return of_completions(batch, np.bincount(batch.completion_of_tokens, values, minlength=batch.num_completions))
