"""Which cases of a product `make test` takes; `make test-sweep` takes the others."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest


def swept(*cases: Any) -> list[Any]:
    """Cases as parameters that `make test-sweep` alone takes; a tuple is the values of several arguments."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.sweep) for case in cases]


def chosen(some: Collection, cases: Collection) -> list[Any]:
    """Cases as parameters: `make test` takes ``some`` of them, `make test-sweep` the others."""
    return [*some, *swept(*(case for case in cases if case not in some))]


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
