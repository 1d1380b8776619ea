"""Weight sync from the trainer to the engines, and its check."""
