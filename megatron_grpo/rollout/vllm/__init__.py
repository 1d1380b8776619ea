"""vLLM in the training processes, and vLLM servers."""
