"""Metrics of a rollout: rewards, lengths, turns."""

from argparse import Namespace

import numpy as np

from megatron_grpo.algorithm.advantages import group_statistics
from megatron_grpo.data.batch import FinishReason
from megatron_grpo.rollout.source import Rollout


def rollout_metrics(args: Namespace, rollout: Rollout, rewards: np.ndarray) -> dict[str, float]:
    """Return the metrics of a rollout's rewards (weighted sums ``[n]``) and lengths, and those of its source.

    The names are those of METRICS.
    """
    batch = rollout.batch
    groups = group_statistics(rewards, batch.group_ids)
    row = {
        "reward/mean": mean_of_scored(rewards),
        "reward/std": groups.mean_std,
        "reward/failures": rollout.reward_failures,
        "reward/zero_std_groups": groups.zero_std_groups / groups.num_groups,
        "tokens/rollout": int(batch.response_lengths.sum()),
        "completion/length_mean": float(batch.response_lengths.mean()),
        "completion/length_min": int(batch.response_lengths.min()),
        "completion/length_max": int(batch.response_lengths.max()),
        "completion/truncated": float((batch.finish_reasons == FinishReason.LENGTH).mean()),
    }
    if args.environment:
        row["environment/turns"] = float(batch.turns.mean())
        row["environment/tokens"] = float((batch.completion_lengths - batch.response_lengths).mean())
        row["environment/failed"] = float((batch.finish_reasons == FinishReason.FAILED).mean())
    if args.tool_call_parser and batch.malformed_calls is not None:
        row["turns/malformed_calls"] = float(batch.malformed_calls.sum() / batch.turns.sum())
    for name, column in zip(args.reward_funcs, batch.rewards.T, strict=True):
        row[f"reward/{name}/mean"] = mean_of_scored(column)
        if len(scored := column[~np.isnan(column)].astype(np.float64)):
            row |= {f"reward/{name}/min": float(scored.min()), f"reward/{name}/max": float(scored.max())}
            row[f"reward/{name}/std"] = float(scored.std(ddof=1)) if len(scored) > 1 else 0.0
    return row | rollout.metrics


def mean_of_scored(values: np.ndarray) -> float:
    """Return the mean of the values that are not nan; nan if all are."""
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if len(scored) else float("nan")
