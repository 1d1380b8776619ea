"""Models compute in float64, so that their comparisons need no room for rounding: pytest --float64."""

import torch

ROUNDING = 1e-9  # megatron-core has 8 digits of GELU's constant


def install() -> None:
    """Let float32 mean float64 to all modules that are imported later."""
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.FloatTensor = torch.DoubleTensor
    torch.Tensor.float = torch.Tensor.double
    torch.nn.Module.float = torch.nn.Module.double
    torch.nn.functional.grouped_mm = torch._grouped_mm = _grouped_mm  # PyTorch's has no float64


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of the expected values where they are not all zero."""
    return ((found - expected).norm() / expected.norm()).item() if expected.any() else found.abs().max().item()


def bound(of_float32: float) -> float:
    """Return the bound of a relative difference: that of float32, or of float64 where the tests run in it."""
    return ROUNDING if torch.float32 is torch.float64 else of_float32


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return [rows, n] for a [rows, k] and b [groups, k, n], or [groups, m, n] for a [m, rows] and b [rows, n]."""
    begins, ends = [0, *offs.tolist()], offs.tolist()
    if b.dim() == 3:
        assert ends[-1] == len(a)
        return torch.cat([a[i:j] @ weight for i, j, weight in zip(begins[:-1], ends, b, strict=True)])
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in zip(begins[:-1], ends, strict=True)])
