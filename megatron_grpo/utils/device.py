"""The device of this process, and copies to it."""

import time
from glob import glob

import torch

from megatron_grpo.utils.errors import GrpoError

CPU = torch.device("cpu")
GPU_FILES = "/dev/nvidia[0-9]*"  # of the driver, one for each GPU


def device() -> torch.device:
    """Return the device of this process: its current GPU, or the CPU."""
    return CPU if not torch.cuda.is_available() else torch.device("cuda", torch.cuda.current_device())


def needs_gpu(given: str, instead: str) -> GrpoError:
    """Return the error of flags that need a GPU where torch sees none; ``instead``: the cure on a host without one."""
    return GrpoError(f"{given} needs a GPU, and {unseen_gpus() or f'this machine has none: {instead}'}")


def unseen_gpus() -> str | None:
    """Return why torch sees none of this host's GPUs, and the cure; None if it sees some, or the host has none."""
    if torch.cuda.is_available() or not glob(GPU_FILES):
        return None
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build for CPUs, which sees none of this host's: install "
            "requirements-gpu.txt into an environment of its own, and activate that"
        )
    return (
        f"torch {torch.__version__} sees none of this host's (CUDA_VISIBLE_DEVICES, driver): "
        "python tools/check_install.py names the cause"
    )


def device_time() -> float:
    """Return seconds of a clock, once the device has finished its queued work, whose time else counts for later."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def to_device(tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
    """Return a tensor of the host on the device ``to``; the host does not wait for the device's earlier work.

    A copy from memory that is not pinned may wait for it.
    """
    return tensor.pin_memory().to(to, non_blocking=True) if to.type == "cuda" else tensor.to(to)
