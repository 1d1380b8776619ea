"""The reward functions that ship."""
