"""Which cases of a product `make test` takes; `make test-sweep` takes the others."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest


def diagonals(*axes: Collection) -> list[Any]:
    """The product of the axes as parameters, of which `make test` takes two diagonals: in each every value occurs.

    The second is one step further off on each axis, so that what met in the first meets something else.
    """
    lists = [list(axis) for axis in axes]
    taken = {
        tuple((i + turn * place) % len(axis) for place, axis in enumerate(lists))
        for i in range(max(map(len, lists)))
        for turn in (0, 1)
    }
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(lists, where, strict=True)),
            marks=() if where in taken else pytest.mark.sweep,
        )
        for where in product(*(range(len(axis)) for axis in lists))
    ]
