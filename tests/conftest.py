"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from world import Pool, World

POOL_SIZE = 4


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """``world(n)``: the first n ranks of the session's pool of gloo processes."""
    pool = Pool(POOL_SIZE)
    yield lambda size: World(pool, size)
    pool.close()
