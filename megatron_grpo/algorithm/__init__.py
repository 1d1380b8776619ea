"""The mathematics of GRPO: pure functions on tensors and arrays, with no process group, flag or model in sight.

In the order of one step: advantages (rewards -> A), weighting (how tokens are averaged), losses (A -> loss of each
token), corrections (how far the engine that sampled is from the trainer that learns).
"""
