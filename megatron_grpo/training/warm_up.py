"""Supervised warm-up: --sft-iters updates on demonstrations before the first rollout.

The updates have iterations below 0, from -N to -1: --train-iters and all intervals of the policy's updates count as
without a warm-up. A checkpoint of the warm-up is iteration 0 and holds its position (`WarmUp.state`). The optimizer is
the run's, and its moments go on: the first updates of the policy are still scaled by those of the warm-up. The learning
rate is --sft-lr after the run's linear warm-up; the run's schedule begins after the last of these updates. A reference
model without weights of its own (--ref-load) then takes the policy's.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, cast

from megatron_grpo.data.batch import RolloutBatch
from megatron_grpo.data.demonstrations import Demonstration, Demonstrations, batch_of
from megatron_grpo.data.prompts import draw
from megatron_grpo.utils.arguments import Arguments, replaced

# Flags of the policy's updates that those of the warm-up do not follow.
SETTINGS: dict[str, Any] = {
    "loss_type": "sft",
    "sft_loss_type": None,
    "importance_sampling_level": "token",
    "temperature": 1.0,
    **dict.fromkeys(("beta", "entropy_coef"), 0.0),
    "top_entropy_quantile": 1.0,
    "router_replay_mode": "disabled",
    **dict.fromkeys("clip_cov_ratio kl_cov_ratio m2po_threshold off_policy_sequence_mask_delta".split()),
    "rollout_importance_sampling_mode": None,
    "exact_log_probs": False,  # no engine has sampled a demonstration
}
KEPT = ("lr", "grad_norm", "mtp/grad_norm", "update/skipped", "moe/balance_loss")  # metrics of any update


class ConstantRate:
    """Learning rate of the warm-up: --sft-lr times the factor of each group, after a linear warm-up.

    It is as long as the run's: --lr-warmup-iters, or --lr-warmup-fraction of --sft-iters.
    """

    def __init__(self, args: Namespace, optimizer: Any, num_steps: int):
        fraction = args.lr_warmup_fraction
        self.warmup = args.lr_warmup_iters if fraction is None else int(fraction * args.sft_iters)
        self.rate, self.optimizer, self.num_steps = args.sft_lr, optimizer, num_steps

    def step(self, increment: int) -> None:
        """Count ``increment`` updates, and set the learning rate of the next one."""
        self.num_steps += increment
        share = min(1.0, self.num_steps / self.warmup) if self.warmup else 1.0
        for group in self.optimizer.param_groups:
            rate = share * self.rate * group.get("lr_mult", 1.0)
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(rate)  # a tensor that the optimizer's kernels read
            else:
                group["lr"] = rate


class WarmUp:
    """Demonstrations, learning rate and position of the warm-up.

    ``state``: of a checkpoint, {} at the start; ``over``: the checkpoint is one of the policy's updates. The row ids of
    the demonstrations begin at ``first_row``.
    """

    def __init__(
        self,
        args: Arguments,
        data: Demonstrations,
        optimizer: Any,
        state: Mapping[str, Any],
        over: bool = False,
        first_row: int = 0,
    ):
        self.args = replaced(args, **SETTINGS)  # of an update
        self._data, self._sampler, self._first_row = data, data.sampler(), first_row
        self.total: int = args.sft_iters
        self.done: int = self.total if over else min(state.get("done", 0), self.total)
        self.schedule = ConstantRate(args, optimizer, state.get("steps", 0))
        if "sampler" in state and not over:
            self._sampler.load_state_dict(state["sampler"])

    @property
    def left(self) -> int:
        """Return the number of updates before the first rollout."""
        return self.total - self.done

    def next_batch(self) -> RolloutBatch:
        """Return the demonstrations of the next update, with all tokens on every rank."""
        found = draw(self._data, self._sampler, self.args.global_batch_size)
        return batch_of(cast(list[Demonstration], found), self._first_row)

    def metrics(self, row: Mapping[str, float], batch: RolloutBatch) -> dict[str, float]:
        """Return the metrics to log of an update: none of rollouts, ratios and engines."""
        own = {"sft/loss": row["loss"], "sft/tokens": int(batch.response_lengths.sum())}
        return own | {name: row[name] for name in KEPT if name in row}

    def state(self) -> dict[str, Any]:
        """Return the position for a checkpoint."""
        return {"done": self.done, "steps": self.schedule.num_steps, "sampler": self._sampler.state_dict()}
