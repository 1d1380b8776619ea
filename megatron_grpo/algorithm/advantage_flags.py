"""Flags of advantages and of the KL divergence from the reference."""

from megatron_grpo.algorithm.advantages import ESTIMATORS
from megatron_grpo.algorithm.kl import KL_ESTIMATORS

SCALES = ("group", "batch", "none", "gdpo")

# Rows of ``arguments.FLAGS``.
ADVANTAGE_FLAGS = (
    ("--advantage-estimator", ESTIMATORS, "grpo", "how rewards become advantages: docs/algorithms.md"),
    (
        "--scale-rewards",
        SCALES,
        None,
        "divide advantages by whose standard deviation [grpo: group; rloo, pass_at_k: none; others: batch]",
    ),
    ("--pass-at-k", int, None, "pass_at_k: learn to solve a prompt with the best of so many completions"),
    ("--gamma", float, 1.0, "reinforce_plus_plus: discount of what is still to come, per token"),
    ("--beta", float, 0.04, "weight of the KL divergence from the reference; 0 builds no reference"),
    ("--kl-estimator", KL_ESTIMATORS, "k3", "form of the KL term in the loss; --kl-in-reward: k1"),
    ("--kl-in-reward", bool, False, "subtract the KL divergence from the reward, instead of adding it to the loss"),
)
