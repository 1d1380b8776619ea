"""Layers with the outputs of the colocated vLLM, bit for bit (``--exact-log-probs``)."""

HEAD_SIZES = 64, 128  # channels of a head that the kernel of attention takes
MOST_HEADS = 64  # of a group of queries that share a key
