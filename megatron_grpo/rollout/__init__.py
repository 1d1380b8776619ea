"""Rollout: the interface of inference engines, the engines, and the collection of completions over all ranks."""
