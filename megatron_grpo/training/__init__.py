"""A training run: arguments, validation, set-up, the trainer, one update, and the exit."""
