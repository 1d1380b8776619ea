"""What tests of several layers share."""

import pytest


@pytest.fixture
def small_chunks(monkeypatch):
    """Recurrences in chunks of 8 tokens."""
    from megatron_grpo.models import recurrence  # the test file has prepared the import of megatron.core

    monkeypatch.setattr(recurrence, "CHUNK", 8)
    for cached in (recurrence.chunks_of, recurrence._convolution_places, recurrence._levels):
        cached.cache_clear()
    yield
    recurrence.chunks_of.cache_clear()
