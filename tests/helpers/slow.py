"""Selection of the test cases that run by default; slow cases run with tests/run_tests.sh --all."""

from collections.abc import Collection, Iterable

import pytest

# A dense family, one with latent attention and experts, one with sliding windows, soft caps and tied embeddings.
FEW = ("qwen3", "deepseek_v3", "gemma2")


def slow_except(kept: Collection, cases: Iterable) -> list:
    """Return the cases of a parametrized test, with all cases except ``kept`` marked slow."""
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
