"""A difference of one bit in each kernel of --exact-log-probs, and the first tensor that it reaches."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

LOG_PROBS = "log-probabilities"
FIRST = {
    "rms_norm": "layer 0: input norm",
    "add_and_norm": "layer 0: norm before the MLP",
    "linear": "layer 0: query, key, value",
    "head_norm": "layer 0: rotated queries",  # of models with norms of heads
    "rotate": "layer 0: rotated queries",
    "attention": "layer 0: attention",
    "silu_and_mul": "layer 0: activation",
    "token_log_probs": LOG_PROBS,
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Context in which a kernel changes a bit of one number of its result: the last one.

    Of a norm of heads it is the sign, because the rotation that follows could round the last bit away.
    """
    from megatron_grpo.models.exact import head, kernels  # they import Triton; a test may choose its interpreter

    module: Any = head if name == "token_log_probs" else kernels
    kernel = getattr(module, name)
    setattr(module, name, _changed(kernel, sign=name == "head_norm"))
    try:
        yield
    finally:
        setattr(module, name, kernel)


def _changed(kernel: Callable, sign: bool) -> Callable:
    def changed(*args, **options):
        found = kernel(*args, **options)
        value = found[0] if isinstance(found, tuple) else found
        row = value[len(value) // 2 :][:1].view(-1)
        number = row[len(row) // 2 :][:1]
        bits = number.view(torch.int32 if number.dtype == torch.float32 else torch.int16)
        bits ^= torch.iinfo(bits.dtype).min if sign else 1
        return found

    return changed
