"""Low-rank adapters (LoRA, arXiv:2106.09685) of frozen linear layers, in every parallel configuration.

``targets`` selects the layers; ``table`` describes the adapters' matrices as weights of the parameter mapping;
``layers`` computes an adapted layer; ``attach`` adds adapters to a built model and freezes its other weights; ``base``
identifies the frozen weights; ``stream`` yields the adapter, or the merged weights, as full Hugging Face tensors;
``files`` reads and writes PEFT's directories.
"""
