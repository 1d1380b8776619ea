"""Fixture that restores the registries after a test."""

import pytest

from megatron_grpo.algorithm.advantages import ADVANTAGES
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.rewards import registry


@pytest.fixture
def plugins():
    """Remove the test's registrations after the test: losses, estimators, their flags, rewards, loaded files."""
    tables = [getattr(table, name) for table in (LOSSES, ADVANTAGES) for name in ("entries", "flags", "owners")]
    tables.append(registry._registry)
    before, loaded = [dict(table) for table in tables], set(registry._loaded)
    yield
    for table, old in zip(tables, before, strict=True):  # in place: the parser's rows refer to these dictionaries
        table.clear()
        table.update(old)
    registry._loaded.clear()
    registry._loaded.update(loaded)
