"""Layers with the outputs of the colocated vLLM, bit for bit (``--exact-log-probs``)."""

HEAD_SIZES = 64, 128  # channels of a head that the kernel of attention takes
QUERIES_AND_HEADS = 64  # rows of its product of queries and keys: some queries times the heads of a group
