"""Rollout: what an inference engine promises, the engines, and how a rollout is collected over all ranks."""
