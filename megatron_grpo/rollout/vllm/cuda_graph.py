"""CUDA graphs that a thread records while other threads may use the GPU."""

from collections.abc import Callable
from typing import Any

import torch


def record(call: Callable[[], Any], stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of what ``call`` launches, recorded on ``stream``; its memory is of ``pool`` if given."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        # Other threads may use the GPU meanwhile.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph
