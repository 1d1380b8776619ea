"""The training model itself as the engine."""
