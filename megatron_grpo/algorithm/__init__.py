"""The mathematics of GRPO: pure functions on tensors and arrays, with no process group, flag or model in sight.

In the order of one step: advantages (rewards -> A), distillation (a teacher's part in A), weighting (how tokens are
averaged), losses (A -> loss of each token), kl (the cost of leaving the reference), masks (which tokens are learnt
from), corrections (how far the engine that sampled is from the trainer that learns).
"""
