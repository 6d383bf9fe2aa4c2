"""Which cases of a product `make test` takes; `make test-sweep` takes the others."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest


def diagonals(*axes: Collection) -> list[Any]:
    """The product of the axes as parameters, of which `make test` takes a diagonal: every value occurs in it."""
    lists = [list(axis) for axis in axes]
    taken = {tuple(i % len(axis) for axis in lists) for i in range(max(map(len, lists)))}
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(lists, where, strict=True)),
            marks=() if where in taken else pytest.mark.sweep,
        )
        for where in product(*(range(len(axis)) for axis in lists))
    ]
