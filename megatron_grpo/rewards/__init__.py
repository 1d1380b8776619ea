"""Reward functions, their registry, and the pool of processes that runs them."""
