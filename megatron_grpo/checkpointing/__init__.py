"""Checkpoints on megatron.core.dist_checkpointing: save, load, directory, optimizer state."""
