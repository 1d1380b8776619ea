"""Inference engine that generates with the training model itself."""
