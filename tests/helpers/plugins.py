"""Registries that forget what a test has added to them."""

import pytest

from megatron_grpo.algorithm.advantages import ADVANTAGES
from megatron_grpo.algorithm.losses import LOSSES
from megatron_grpo.rewards import registry


@pytest.fixture
def plugins():
    """After the test, remove what it has registered: losses, estimators, their flags, rewards, loaded files."""
    tables = [getattr(table, name) for table in (LOSSES, ADVANTAGES) for name in ("entries", "flags", "owners")]
    tables.append(registry._registry)
    before, loaded = [dict(table) for table in tables], set(registry._loaded)
    yield
    for table, old in zip(tables, before, strict=True):  # in place: the parser's rows hold the tables themselves
        table.clear()
        table.update(old)
    registry._loaded.clear()
    registry._loaded.update(loaded)
