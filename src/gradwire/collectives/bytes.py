"""Closed forms: the bytes that bandwidth-optimal collectives send.

Totals are over all ranks, so that they are integers. One rank's part is what it sends where the buffer is cut into
`share` s: the parts of all ranks add up to the total exactly, also where the ranks do not divide the buffer.
"""

from __future__ import annotations

FLOAT32 = 4  # bytes


def share(amount: int, world: int, rank: int) -> int:
    """Size of rank's part when ``amount`` is cut as evenly as integers allow."""
    return amount * (rank + 1) // world - amount * rank // world


def raw_reduce_scatter(numel: int, world: int) -> int:
    """Bytes over all ranks of a float32 reduce-scatter of ``numel`` elements."""
    return (world - 1) * FLOAT32 * numel


def raw_all_gather(numel: int, world: int) -> int:
    """Bytes over all ranks of a float32 all-gather to ``numel`` elements: every part goes to all other ranks."""
    return raw_reduce_scatter(numel, world)


def raw_all_reduce(numel: int, world: int) -> int:
    """Bytes over all ranks of a float32 all-reduce of ``numel`` elements."""
    return 2 * raw_reduce_scatter(numel, world)


def sent_all_reduce(amount: int, world: int, rank: int) -> int:
    """Bytes that ``rank`` sends to all-reduce ``amount`` bytes: the others' shares, then its own to each of them."""
    own = share(amount, world, rank)
    return amount - own + (world - 1) * own
