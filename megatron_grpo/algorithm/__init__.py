"""The mathematics of GRPO: losses, advantages, KL penalties, masks and weights, with their flags.

In the order of one step: advantages (rewards -> A), distillation (the teacher's term in A), importance_sampling
(rollout importance weights), masks (tokens in the policy term), losses (A -> loss of each token), kl (KL penalty to the
reference model), weighting (token weights over the global batch).
"""
