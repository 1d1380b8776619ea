"""Megatron checkpoints and Hugging Face directories, one made of the other without a model."""
