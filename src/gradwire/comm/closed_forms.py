"""Closed forms of the bytes that bandwidth-optimal collectives send.

Totals are over all ranks, so that they are integers. A single rank's bytes assume a buffer cut into `share` s; they add
up to the total exactly, also if the number of ranks does not divide the buffer.
"""

from __future__ import annotations

FLOAT32 = 4  # bytes


def share(amount: int, world: int, rank: int) -> int:
    """Return the size of ``rank``'s part when ``amount`` is cut as evenly as integers allow."""
    return amount * (rank + 1) // world - amount * rank // world


def raw_reduce_scatter(numel: int, world: int) -> int:
    """Return the bytes over all ranks of a float32 reduce-scatter of ``numel`` elements."""
    return (world - 1) * FLOAT32 * numel


def raw_all_gather(numel: int, world: int) -> int:
    """Return the bytes over all ranks of a float32 all-gather to ``numel`` elements: each part goes to all others."""
    return raw_reduce_scatter(numel, world)


def raw_all_reduce(numel: int, world: int) -> int:
    """Return the bytes over all ranks of a float32 all-reduce of ``numel`` elements."""
    return 2 * raw_reduce_scatter(numel, world)


def sent_all_reduce(amount: int, world: int, rank: int) -> int:
    """Return the bytes ``rank`` sends to all-reduce ``amount`` bytes: the others' shares, then its own to each."""
    own = share(amount, world, rank)
    return amount - own + (world - 1) * own
