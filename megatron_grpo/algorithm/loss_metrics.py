"""Metrics of an update: scalars that the loss reports for each micro-batch, and the logged metrics.

`report` makes one scalar of each quantity of a micro-batch. The trainer combines the scalars of all micro-batches and
data-parallel ranks by their names: a name that ends in ``/min`` or ``/max`` takes the extreme, every other name the
sum. `update_metrics` converts the totals to metrics: sums over tokens become means.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_grpo.algorithm.importance_sampling import mismatch, mismatch_metrics
from megatron_grpo.algorithm.kl import kl_k3
from megatron_grpo.algorithm.policy_term import PolicyTerm


@torch.no_grad()
def report(
    loss: Tensor, policy: PolicyTerm, log_probs: Tensor, old: Tensor, entropy: Tensor, batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the named scalars of one micro-batch with t label tokens; t may be 0.

    Args:
        loss: scalar, of the micro-batch.
        policy: its policy term, with the metrics that the loss type itself returned.
        log_probs, old, entropy: [t], under the policy being trained (log_probs, entropy) and the old policy.
        batch: the other tensors of the micro-batch, [t] each.
    """
    ratio = (log_probs - old).exp()
    kl = kl_k3(log_probs, batch["ref_log_probs"]) if "ref_log_probs" in batch else torch.zeros_like(ratio)
    of_tokens = {
        "entropy": entropy,
        "kl": kl,
        "clip/low": policy.clip_low,
        "clip/high": policy.clip_high,
        "clip/masked": policy.masked,
        "ratio/mean": ratio,
        **({"teacher/divergence": batch["divergence"]} if "divergence" in batch else {}),
        **policy.metrics,
    }
    values = {"loss": loss, "tokens": loss.new_full((), len(old))}
    values |= {name: tensor.sum() for name, tensor in of_tokens.items()}
    values["ratio/min"] = ratio.amin() if len(ratio) else ratio.new_ones(())
    values["ratio/max"] = ratio.amax() if len(ratio) else ratio.new_ones(())
    values |= mismatch(old, batch["rollout_log_probs"], batch.get("newest"))
    if policy.weight_clipped is not None:
        values["mismatch/clipped"] = policy.weight_clipped.sum().to(old)
    return {name: value.detach() for name, value in values.items()}


@torch.no_grad()
def report_demonstrations(loss: Tensor, log_probs: Tensor) -> dict[str, Tensor]:
    """Return the named scalars of a micro-batch of demonstrations beside the rollout; ``log_probs``: [t]."""
    values = {"loss": loss, "tokens": loss.new_full((), len(log_probs)), "cross_entropy": -log_probs.sum()}
    return {name: value.detach() for name, value in values.items()}


def demonstration_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an update's demonstrations, from `report_demonstrations` of all its micro-batches."""
    tokens = totals["tokens"]
    return {"loss": totals["loss"], "sft/loss": totals["cross_entropy"] / max(tokens, 1), "sft/tokens": tokens}


def is_extreme(name: str) -> bool:
    """Return whether a reported value is a minimum or a maximum; all others are sums."""
    return name.endswith(("/min", "/max"))


def update_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an update, under their names in metrics.jsonl, from the reports of all its micro-batches.

    The loss stays a sum, because the token weights already contain the average.
    """
    tokens = max(totals["tokens"], 1)  # --overlong-filter can leave an update without any
    row = {
        name: value if is_extreme(name) or name == "loss" else value / tokens
        for name, value in totals.items()
        if name != "tokens" and not name.startswith("mismatch/")
    }
    if "mismatch/clipped" in totals:
        row["mismatch/clipped"] = totals["mismatch/clipped"] / tokens
    return row | mismatch_metrics(totals)
