"""The advantages of a rollout as the flags ask for them: algorithm/'s functions, put together."""

import numpy as np

from megatron_grpo.algorithm.advantages import ADVANTAGES, gdpo_advantages
from megatron_grpo.algorithm.distillation import on_policy_distillation
from megatron_grpo.algorithm.kl import kl_penalties
from megatron_grpo.algorithm.registry import call
from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.utils.errors import GrpoError


def estimate_advantages(args, batch: RolloutBatch, rewards: np.ndarray) -> dict[str, float]:
    """Give the batch its ``advantages``, and ``token_advantages`` where tokens of one completion may differ.

    ``rewards`` [n] are the weighted sums. With --kl-in-reward the batch must have log-probabilities under the old
    policy and the reference; with a teacher, under the old policy and the teacher. Returns metrics, under the names of
    ``metric_guide.METRICS``.
    """
    metrics, penalties = {}, None
    estimator = ADVANTAGES.get(args.advantage_estimator)
    if args.kl_in_reward:
        penalties = kl_penalties(batch.old_log_probs, batch.ref_log_probs, batch.response_mask, args.beta)
        penalty = np.bincount(batch.completion_of_tokens, penalties, minlength=batch.num_completions)
        metrics["reward/kl_penalty"] = float(penalty.mean())
        if "penalties" not in estimator.parameters:
            rewards = (rewards - penalty).astype(np.float32)

    batch.token_advantages = None
    if args.scale_rewards == "gdpo":
        batch.advantages = gdpo_advantages(batch.rewards, args.reward_weights, batch.group_ids)
    else:
        inputs = {
            "rewards": rewards,
            "group_ids": batch.group_ids,
            "response_mask": batch.response_mask,
            "cu_seqlens": batch.cu_seqlens,
            "penalties": penalties,
        }
        advantages = np.asarray(call(estimator.function, inputs, args), np.float32)
        size = len(batch.tokens) if estimator.per_token else batch.num_completions
        if advantages.shape != (size,):
            raise GrpoError(
                f"--advantage-estimator {estimator.name} returned advantages of shape {advantages.shape}: return one "
                f"of each {'token' if estimator.per_token else 'completion'} ({size})"
            )
        if estimator.per_token:
            batch.token_advantages = advantages
        else:
            batch.advantages = advantages
    if batch.teacher_log_probs is not None:
        gaps = (batch.old_log_probs - batch.teacher_log_probs)[batch.response_mask == 1]
        metrics["teacher/kl"] = float(gaps.mean())
        of_tokens = batch.token_advantages
        if of_tokens is None:
            of_tokens = np.repeat(batch.advantages, batch.lengths)
        batch.token_advantages = on_policy_distillation(
            of_tokens, batch.teacher_log_probs, batch.old_log_probs, batch.response_mask, args.teacher_kl_coef
        )
    if batch.token_advantages is not None:  # of a completion: the mean over its tokens in the loss
        sums = np.bincount(batch.completion_of_tokens, batch.token_advantages, minlength=batch.num_completions)
        batch.advantages = (sums / np.maximum(batch.response_lengths, 1)).astype(np.float32)
    metrics["advantage/mean"] = float(batch.advantages.mean())
    metrics["advantage/std"] = float(batch.advantages.std(ddof=1)) if batch.num_completions > 1 else 0.0
    return metrics
