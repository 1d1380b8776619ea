"""GRPO on Megatron-Core and vLLM; the algorithm is in ``pretrain_grpo.py``."""

import warnings

# What is absent is said once, in the banner, not by ten modules of megatron-core on every rank.
warnings.filterwarnings("ignore", message="(?i).*(apex|transformer ?engine).*not installed.*")
warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")  # about kernels' order on a GPU
warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated.*")  # in megatron-core and vLLM
warnings.filterwarnings("ignore", message="MimoModelConfig is experimental.*")  # megatron-core 0.19, at its import
warnings.filterwarnings("ignore", message="The legacy GroupedMLP will be deprecated")  # not used: GroupedExperts is

# megatron-core's: its DDP hooks keep AccumulateGrad nodes, and its optimizer reads .grad of each parameter's copy.
warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
