"""Weights between Hugging Face checkpoints, the Megatron-Core model and the rollout engine.

``families`` holds one table of parameter mappings per model family; ``parameter_mapping`` defines a mapping between one
Megatron parameter and its Hugging Face tensors; ``model_weights`` matches a table with the parameters of a built model;
``hf`` loads and saves Hugging Face directories; ``safetensors_files`` reads and writes their files; ``stream`` yields
full Hugging Face tensors from a model that is sharded over ranks; ``transfer_plan`` says which elements of which shards
the ranks of an engine receive.
"""
