"""vLLM in the training processes, and its servers."""
