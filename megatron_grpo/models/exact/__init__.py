"""Layers whose outputs equal those of the colocated vLLM bit for bit (``--exact-log-probs``)."""
