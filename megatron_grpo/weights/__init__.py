"""Weights between Hugging Face checkpoints, the Megatron-Core model and the rollout engine.

``families`` holds one table per model family, ``layout`` the algebra that the tables are written in, ``mapping`` joins
a table with a built model, ``hf`` reads and writes safetensors, ``stream`` yields full Hugging Face tensors from a
model that is spread over ranks.
"""
