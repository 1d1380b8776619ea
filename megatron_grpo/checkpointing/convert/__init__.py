"""Conversion between Megatron checkpoints and Hugging Face directories, without building a model."""
