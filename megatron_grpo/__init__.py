"""GRPO on Megatron-Core and vLLM; the algorithm is in ``pretrain_grpo.py``."""

import logging
import sys
import warnings
from functools import partial

if sys.version_info < (3, 12):  # noqa: UP036 (other modules have syntax that older versions do not read)
    found = sys.version.split()[0]
    sys.exit(f"megatron-grpo needs Python 3.12 or 3.13, and {sys.executable} is {found}: see docs/gpus.md#versions")

__version__ = "0.1.0"  # the top version of CHANGELOG.md, whose tag is v0.1.0

# What is absent is said once, in the banner, not by ten modules of megatron-core on every rank.
warnings.filterwarnings("ignore", message="(?i).*(apex|transformer ?engine).*not installed.*")
warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")  # about kernels' order on a GPU
warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated.*")  # in megatron-core and vLLM
warnings.filterwarnings("ignore", message="MimoModelConfig is experimental.*")  # at megatron-core's import

# megatron-core's: its DDP hooks keep AccumulateGrad nodes, and its optimizer reads .grad of each parameter's copy.
warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")


def _is_other(beginning: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginning)


# Messages that a user can do nothing about, by the logger's name and their beginning.
for _name, _beginning in {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    "torch.utils.cpp_extension": "No CUDA runtime is found",  # torch's build for CUDA on a machine without a GPU
}.items():
    logging.getLogger(_name).addFilter(partial(_is_other, _beginning))
