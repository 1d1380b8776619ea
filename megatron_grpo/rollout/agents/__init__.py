"""Agent programs as rollouts: they call the policy behind a URL, and their calls become trajectories."""
