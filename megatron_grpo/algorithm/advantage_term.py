"""The advantages of a rollout as the flags ask for them: algorithm/'s functions, put together."""

import numpy as np

from megatron_grpo.algorithm import advantages as adv
from megatron_grpo.algorithm.distillation import on_policy_distillation
from megatron_grpo.algorithm.kl import kl_penalties
from megatron_grpo.data.batch import RolloutBatch


def estimate_advantages(args, batch: RolloutBatch, rewards: np.ndarray) -> dict[str, float]:
    """Give the batch its ``advantages``, and ``token_advantages`` where tokens of one completion may differ.

    ``rewards`` [n] are the weighted sums. With --kl-in-reward the batch must have log-probabilities under the old
    policy and the reference; with a teacher, under the old policy and the teacher. Returns metrics, under the names of
    ``metric_guide.METRICS``.
    """
    metrics, penalties = {}, None
    if args.kl_in_reward:
        penalties = kl_penalties(batch.old_log_probs, batch.ref_log_probs, batch.loss_mask, args.beta)
        penalty = np.bincount(batch.completion_of_tokens, penalties, minlength=batch.num_completions)
        metrics["reward/kl_penalty"] = float(penalty.mean())
        if args.advantage_estimator != "reinforce_plus_plus":
            rewards = (rewards - penalty).astype(np.float32)

    batch.token_advantages = None
    match args.advantage_estimator:
        case "grpo" if args.scale_rewards == "gdpo":
            batch.advantages = adv.gdpo_advantages(batch.rewards, args.reward_weights, batch.group_ids)
        case "grpo":
            batch.advantages = adv.group_advantages(rewards, batch.group_ids, args.scale_rewards)
        case "rloo":
            batch.advantages = adv.rloo_advantages(rewards, batch.group_ids, args.scale_rewards)
        case "reinforce_plus_plus_baseline":
            batch.advantages = adv.reinforce_plus_plus_baseline_advantages(rewards, batch.group_ids)
        case "pass_at_k":
            batch.advantages = adv.pass_at_k_advantages(rewards, batch.group_ids, args.pass_at_k, args.scale_rewards)
        case "reinforce_plus_plus":
            batch.token_advantages = adv.reinforce_plus_plus_advantages(
                rewards, penalties, batch.loss_mask, batch.cu_seqlens, args.gamma
            )
    if batch.teacher_log_probs is not None:
        gaps = (batch.old_log_probs - batch.teacher_log_probs)[batch.loss_mask == 1]
        metrics["teacher/kl"] = float(gaps.mean())
        of_tokens = batch.token_advantages
        if of_tokens is None:
            of_tokens = np.repeat(batch.advantages, batch.lengths)
        batch.token_advantages = on_policy_distillation(
            of_tokens, batch.teacher_log_probs, batch.old_log_probs, batch.loss_mask, args.teacher_kl_coef
        )
    if batch.token_advantages is not None:  # of a completion: the mean over its tokens in the loss
        sums = np.bincount(batch.completion_of_tokens, batch.token_advantages, minlength=batch.num_completions)
        batch.advantages = (sums / np.maximum(batch.loss_lengths, 1)).astype(np.float32)
    metrics["advantage/mean"] = float(batch.advantages.mean())
    metrics["advantage/std"] = float(batch.advantages.std(ddof=1)) if batch.num_completions > 1 else 0.0
    return metrics
