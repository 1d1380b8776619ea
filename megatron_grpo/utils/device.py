"""The device of this process, and copies to it."""

import torch

CPU = torch.device("cpu")


def device() -> torch.device:
    """Return the device of this process: its current GPU, or the CPU."""
    return CPU if not torch.cuda.is_available() else torch.device("cuda", torch.cuda.current_device())


def to_device(tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
    """Return a tensor of the host on the device ``to``; the host does not wait for the device's earlier work.

    A copy from memory that is not pinned may wait for it.
    """
    return tensor.pin_memory().to(to, non_blocking=True) if to.type == "cuda" else tensor.to(to)
