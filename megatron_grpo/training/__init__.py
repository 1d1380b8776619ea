"""A run from its flags to its end: arguments, validation, set-up, the trainer, one update."""
