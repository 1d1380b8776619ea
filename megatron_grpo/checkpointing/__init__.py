"""Checkpoints in the format of megatron.core.dist_checkpointing: save, load, directory, optimizer state."""
