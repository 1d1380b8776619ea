"""Environments: what answers the policy between its turns (tools, games, programs)."""
