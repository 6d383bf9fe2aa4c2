"""Ways to communicate: collectives, flat and in two levels, and the bytes and messages that a rank sends.

Bytes and messages are the closed forms in Thakur, Rabenseifner and Gropp ("Optimization of Collective Communication
Operations in MPICH", IJHPCA 19, 2005); in two levels as in Mikami et al. ("Massively Distributed SGD:
ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233): within groups, then between them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gradwire.measurement.measured_run import Flow, Measurement

WAYS = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "all-gather", "all_to_all": "all-to-all"}


class Sends(NamedTuple):
    """Bytes and number of sequential messages that one rank sends in a collective."""

    bytes: float
    messages: int


def reduce_scatter(size: float, world: int) -> Sends:
    """A ring: W − 1 messages, each 1/W of a buffer of ``size`` bytes."""
    return Sends((world - 1) / world * size, world - 1)


def all_reduce(size: float, world: int) -> Sends:
    """A ring: a reduce-scatter, then an all-gather of the shards."""
    half = reduce_scatter(size, world)
    return Sends(2 * half.bytes, 2 * half.messages)


def all_gather(size: float, world: int) -> Sends:
    """A ring: W − 1 messages of ``size`` bytes, each rank's contribution."""
    return Sends((world - 1) * size, world - 1)


def all_to_all(size: float, world: int) -> Sends:
    """1/W of a buffer of ``size`` bytes to each of W − 1 ranks."""
    return Sends((world - 1) / world * size, world - 1)


def two_levels(world: int) -> tuple[int, int]:
    """Group size and number of groups: the divisors of W that are closest to each other."""
    group = max(size for size in range(1, math.isqrt(world) + 1) if world % size == 0)
    return group, world // group


def hierarchical(op: str, size: float, world: int) -> Sends:
    """A collective within groups, then one between groups, which needs fewer messages.

    The bytes equal those of the flat collective, except for an all-to-all, which sends data leaving a group twice.
    """
    group, groups = two_levels(world)
    messages = group - 1 + groups - 1
    flat = FLAT[op](size, world)
    if op == "all_to_all":
        return Sends(((group - 1) / group + (groups - 1) / groups) * size, messages)
    return Sends(flat.bytes, messages * (2 if op == "all_reduce" else 1))


FLAT = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather, "all_to_all": all_to_all}


class Way(NamedTuple):
    """One way to communicate gradients or parameters.

    Attributes:
        name: Name of the algorithm.
        op: The collective.
        sends: Bytes and messages per rank.
        decodings: Encodings of the whole buffer that a rank decodes.
    """

    name: str
    op: str
    sends: Sends
    decodings: int


def ways(measurement: Measurement, world: int) -> list[Way]:
    """Ways to communicate gradients between ``world`` ranks: reductions of summable data, else encodings."""
    op, sent, _ = measurement.gradients
    if measurement.sharded:
        size = sent / all_to_all(1, measurement.world).bytes
        return _levels(op, size, world, 1)
    if op == "all_reduce":
        return _levels(op, sent / all_reduce(1, measurement.world).bytes, world, 1)
    size = (
        sent / (all_gather if op == "all_gather" else all_reduce)(1, measurement.world).bytes
    )  # bytes of one encoded buffer
    both = [*_levels("all_to_all", size, world, 2), *_levels("all_gather", size, world, 1, decodings=world)]
    return [way for way in both if way.op == op or not measurement.fixed]


def parameter_ways(flow: Flow, measured: int, world: int) -> list[Way]:
    """Ways to communicate a step's parameters between ``world`` ranks, each of which holds a shard."""
    size = flow.bytes / all_to_all(1, measured).bytes
    return _levels(flow.op, size / world if flow.op == "all_gather" else size, world, 1)


def _levels(op: str, size: float, world: int, halves: int, decodings: int = 2) -> list[Way]:
    """A flat collective and, if the ranks form groups, a hierarchical one; each runs ``halves`` times."""
    found = [(WAYS[op], FLAT[op](size, world))]
    if min(two_levels(world)) > 1:
        found.append((f"{WAYS[op]}, hierarchical", hierarchical(op, size, world)))
    return [Way(name, op, Sends(halves * sent, halves * messages), decodings) for name, (sent, messages) in found]
