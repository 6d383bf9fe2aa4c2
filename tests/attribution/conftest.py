"""The small model and its data that most tests of attribution read, and none changes."""

from __future__ import annotations

import pytest
from small_model import Small, make


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A small corpus with its shards, and an untrained model."""
    return make(tmp_path_factory.mktemp("small"))
