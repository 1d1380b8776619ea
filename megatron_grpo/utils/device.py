"""The device of this process, and copies to it."""

import time

import torch

CPU = torch.device("cpu")


def device() -> torch.device:
    """Return the device of this process: its current GPU, or the CPU."""
    return CPU if not torch.cuda.is_available() else torch.device("cuda", torch.cuda.current_device())


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
