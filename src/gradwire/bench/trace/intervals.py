"""Sets of time intervals: union, intersection, difference and length, exact in whole nanoseconds.

An interval set is an int64 array of shape [n, 2]: half-open intervals [start, end). Operations accept intervals in any
order, overlapping or empty, and return them sorted, disjoint, non-empty and with adjacent ones merged.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]


def intervals(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """The union of ``(start, end)`` pairs."""
    return union(np.array([*pairs], dtype=np.int64).reshape(-1, 2))


def union(*sets: Intervals) -> Intervals:
    """The time covered by at least one of ``sets``."""
    return _covered([(1, times) for times in sets], level=1)


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """The time covered by both sets."""
    return _covered([(1, union(first)), (1, union(second))], level=2)


def difference(first: Intervals, second: Intervals) -> Intervals:
    """The time covered by ``first`` but not by ``second``."""
    return _covered([(1, union(first)), (-1, union(second))], level=1)


def near(times: Intervals, start: int, end: int) -> Intervals:
    """The intervals of a sorted, disjoint set that overlap [start, end), as a view."""
    return times[np.searchsorted(times[:, 1], start, "right") : np.searchsorted(times[:, 0], end, "left")]


def length(times: Intervals) -> int:
    """The total length of a set in nanoseconds."""
    merged = union(times)
    return int((merged[:, 1] - merged[:, 0]).sum())


def _covered(weighted: list[tuple[int, Intervals]], level: int) -> Intervals:
    """Where the weights of the covering intervals sum to ``level`` or more, by one sweep over all edges."""
    edges = np.concatenate([np.empty(0, np.int64), *(times.ravel() for _, times in weighted)])
    changes = np.concatenate(
        [np.empty(0, np.int64), *(np.tile([weight, -weight], len(times)) for weight, times in weighted)]
    )
    order = np.argsort(edges, kind="stable")
    edges, sums = edges[order], np.cumsum(changes[order])
    inside = (sums[:-1] >= level) & (edges[:-1] < edges[1:])
    starts, ends = edges[:-1][inside], edges[1:][inside]
    gap = starts[1:] != ends[:-1]
    first, last = np.append(True, gap), np.append(gap, True)
    return np.stack([starts[first[: len(starts)]], ends[last[: len(ends)]]], axis=1)
