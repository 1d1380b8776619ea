"""Which cases of a test run by default: the others are marked slow, and run with tests/run_tests.sh --all."""

from collections.abc import Collection, Iterable

import pytest

# Of families: a dense one, one of latent attention and experts, and one of windows, soft caps and tied embeddings.
FEW = ("qwen3", "deepseek_v3", "gemma2")


def slow_except(kept: Collection, cases: Iterable) -> list:
    """The cases of a parametrized test, those that are not ``kept`` marked slow."""
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
